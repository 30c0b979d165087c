"""Compare the logprobs of engine and trainer on one fixed prompt.

The trainer scores the prompt when it saves a version. Each engine scores it before its first answer
from that version. The trainer's scores are stored with the version: in the journal, and in the
folder of a named checkpoint.

A difference beyond the bound has one of two causes: the weights arrived wrong, or the two programs
compute differently. Policy losses use ratios of new to old probabilities, which would be noise.
"""

import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.config.transfers import LogprobCheckConfig
from skyrl_actors.messages.columns import TARGETS, Columns, Example, columns_from
from skyrl_actors.messages.errors import InternalError
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import SampleOutput
from skyrl_actors.messages.weights import SCORED_FILE, SamplerWeights

PROMPT_TOKENS = 32
KEPT = 100
FAR = 10  # times the bound: beyond it the weights are wrong; rounding does not explain it
SCORING = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=True)


def fixed_prompt(vocab_size: int, max_model_len: int) -> tuple[int, ...]:
    """Return the same token ids in every process."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, min(PROMPT_TOKENS, max_model_len - 1))
    return tuple(tokens.tolist())


class LogprobCheck:
    """Hold the prompt and the bound, compare scores, and count differences beyond the bound."""

    def __init__(
        self, check: LogprobCheckConfig, bound: float, dtype: str, report: Callable[[str], None]
    ):
        self.check = check
        self.dtype = dtype  # of the trainer; the bound was chosen for it
        self.bound = bound  # of the mean |Δ logprob|, nats
        self.differences: deque[float] = deque(maxlen=KEPT)
        self.exceeded = 0
        self._report = report
        self.prompt: tuple[int, ...] = ()

    def choose_prompt(self, vocab_size: int, max_model_len: int) -> None:
        self.prompt = fixed_prompt(vocab_size, max_model_len)

    @property
    def rows(self) -> Columns:
        tokens = np.asarray(self.prompt, np.int32)
        return columns_from([Example(tokens[:-1], {TARGETS: tokens[1:]})])

    def can_compare(self, weights: SamplerWeights) -> bool:
        """Return whether these weights have a score that the engines' scores can be compared with.

        They have none if they were saved without a score or with another prompt length. Scores
        from a trainer that computed in another dtype do not count.
        """
        return (
            self.check.action != "off"
            and weights.scored_in == self.dtype
            and len(weights.scored) == len(self.prompt) - 1
        )

    def attach(
        self, weights: SamplerWeights, logprobs: NDArray[np.float32] | None
    ) -> SamplerWeights:
        """Return the weights with the trainer's scores, or unchanged if a score is not finite."""
        if logprobs is None or not np.isfinite(logprobs).all():
            return weights
        return replace(weights, scored=tuple(logprobs.tolist()), scored_in=self.dtype)

    def notes(self, logprobs: NDArray[np.float32] | None) -> dict[str, str]:
        """Return the files for a checkpoint's folder: text by file name."""
        said = self.attach(SamplerWeights(version=""), logprobs)
        kept = {"prompt": self.prompt, "logprobs": said.scored, "dtype": said.scored_in}
        return {SCORED_FILE: json.dumps(kept)} if said.scored else {}

    def load(self, weights: SamplerWeights, folder: Path) -> SamplerWeights:
        """Return the weights with the scores in this folder, if they are of the same prompt."""
        try:
            kept = json.loads((folder / SCORED_FILE).read_text())
            if tuple(kept["prompt"]) != self.prompt:
                return weights
            return replace(
                weights, scored=tuple(map(float, kept["logprobs"])), scored_in=str(kept["dtype"])
            )
        except (OSError, ValueError, KeyError, TypeError):
            return weights

    def compare(self, engine: str, weights: SamplerWeights, output: SampleOutput) -> None:
        """Record the difference. Raise InternalError beyond the limit that the config sets."""
        if output.prompt_logprobs is None:
            return
        version = weights.version
        difference = float(np.abs(output.prompt_logprobs[1:] - np.asarray(weights.scored)).mean())
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
