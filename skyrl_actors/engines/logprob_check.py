"""Compare the logprobs of engine and trainer on the base model's own text.

The trainer scores that text when it saves a version. Each engine scores it before its first answer
from that version. The text and the trainer's scores are stored with the version: in the journal,
and in the folder of a named checkpoint.

A difference beyond the bound has one of two causes: the weights arrived wrong, or the two programs
compute differently. Policy losses use ratios of new to old probabilities, which would be noise.
"""

import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from skyrl_actors.config.transfers import LogprobCheckConfig
from skyrl_actors.engines.check_image import MOST_TOKENS, pictures_in
from skyrl_actors.engines.check_prompt import CONTINUED_TOKENS, OPENING_TOKENS
from skyrl_actors.messages.columns import Columns, columns_from
from skyrl_actors.messages.errors import InternalError
from skyrl_actors.messages.example import TARGETS, Example
from skyrl_actors.messages.image_form import ImageForm
from skyrl_actors.messages.images import Picture
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import SampleOutput
from skyrl_actors.messages.weights import SCORED_FILE, SamplerWeights
from skyrl_actors.transfer.folders import manifests

KEPT = 100
LONGEST = MOST_TOKENS + 2 + OPENING_TOKENS + CONTINUED_TOKENS  # with an image and its marks
FAR = 10  # times the bound: beyond it the weights are wrong; rounding does not explain it
SCORING = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=True)


class _Stored(msgspec.Struct, frozen=True):
    """The content of a checkpoint's file of scores."""

    prompt: Annotated[tuple[int, ...], msgspec.Meta(max_length=LONGEST)]
    logprobs: Annotated[tuple[float, ...], msgspec.Meta(max_length=LONGEST)]
    dtype: str


_STORED = msgspec.json.Decoder(_Stored)


class LogprobCheck:
    """Hold the prompt and the bound, compare scores, and count differences beyond the bound.

    `prompt` is empty until an engine has reported it. Versions saved before are not compared.
    """

    def __init__(
        self,
        check: LogprobCheckConfig,
        bound: float,
        dtype: str,
        report: Callable[[str], None],
        form: ImageForm | None = None,
    ):
        self.check = check
        self.dtype = dtype  # of the trainer; the bound was chosen for it
        self.bound = bound  # of the mean |Δ logprob|, nats
        self.differences: deque[float] = deque(maxlen=KEPT)
        self.exceeded = 0
        self._report = report
        self.prompt: tuple[int, ...] = ()
        self.vocab_size = 0
        self._form = form  # how the base model takes images

    @property
    def wants_prompt(self) -> bool:
        return self.check.action != "off" and not self.prompt

    @property
    def rows(self) -> Columns:
        tokens = np.asarray(self.prompt, np.int32)
        return columns_from(
            [Example(tokens[:-1], {TARGETS: tokens[1:]}, self.pictures_in(self.prompt))]
        )

    def pictures_in(self, prompt: tuple[int, ...]) -> tuple[Picture, ...]:
        """Return the image of a prompt of this check."""
        return pictures_in(prompt, self._form)

    def can_compare(self, weights: SamplerWeights) -> bool:
        """Return whether these weights have a score that the engines' scores can be compared with.

        They have none if they were saved without a score. Scores from a trainer that computed in
        another dtype do not count.
        """
        return (
            self.check.action != "off"
            and weights.scored_in == self.dtype
            and 0 < len(weights.scored) < len(weights.scored_prompt)
        )

    def attach(
        self, weights: SamplerWeights, logprobs: NDArray[np.float32] | None
    ) -> SamplerWeights:
        """Return the weights with the trainer's scores, or unchanged if a score is not finite.

        `logprobs` (float32) is of all tokens of the prompt but the first. Those of the continuation
        are kept.
        """
        if logprobs is None or not np.isfinite(logprobs).all():
            return weights
        kept = logprobs[-CONTINUED_TOKENS:].tolist()
        return replace(weights, scored=tuple(kept), scored_in=self.dtype, scored_prompt=self.prompt)

    def notes(self, logprobs: NDArray[np.float32] | None) -> dict[str, str]:
        """Return the files for a checkpoint's folder: text by file name."""
        said = self.attach(SamplerWeights(version=""), logprobs)
        kept = {"prompt": said.scored_prompt, "logprobs": said.scored, "dtype": said.scored_in}
        return {SCORED_FILE: json.dumps(kept)} if said.scored else {}

    def open_sampler(self, base_model: str, folder: Path, version: str) -> SamplerWeights:
        """Return saved weights, with the scores that are in their folder."""
        parts = manifests(folder, version)
        return self.load(
            SamplerWeights(version=version, parts=parts, base_model=base_model), folder
        )

    def load(self, weights: SamplerWeights, folder: Path) -> SamplerWeights:
        """Return the weights with the scores in this folder, or unchanged if it has none."""
        try:
            kept = _STORED.decode((folder / SCORED_FILE).read_bytes())
        except (OSError, ValueError):  # msgspec's errors are ValueErrors
            return weights
        if not all(0 <= token < self.vocab_size for token in kept.prompt):
            return weights  # another base model's
        return replace(
            weights, scored=kept.logprobs, scored_in=kept.dtype, scored_prompt=kept.prompt
        )

    def compare(self, engine: str, weights: SamplerWeights, output: SampleOutput) -> None:
        """Record the difference. Raise InternalError beyond the limit that the config sets."""
        if output.prompt_logprobs is None:
            return
        version = weights.version
        found = output.prompt_logprobs[-len(weights.scored) :]
        difference = float(np.abs(found - np.asarray(weights.scored)).mean())
        self.differences.append(difference)
        if difference <= self.bound:
            return
        self.exceeded += 1
        text = (
            f"{engine} and the trainer differ by {difference:.2g} nats a token on {version} "
            f"(logprob_check.bound {self.bound:g}): its weights did not arrive, or it computes "
            "differently"
        )
        if not difference <= self._limit:
            raise InternalError(
                f"{text}; sampling from it is refused (logprob_check.action {self.check.action})"
            )
        self._report(text)

    @property
    def _limit(self) -> float:
        """The difference in nats beyond which sampling is refused."""
        return {"refuse": self.bound, "auto": FAR * self.bound}.get(self.check.action, math.inf)
