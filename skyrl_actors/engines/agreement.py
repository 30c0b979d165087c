"""Do engine and trainer agree? One fixed prompt, scored by the trainer when a version is saved and by each engine before it
first answers from it. What the trainer said stays with the version: in the journal, and in a named checkpoint's folder.

What differs beyond the bound is weights that arrived wrong, or two programs that compute otherwise: ratios of new to old
probabilities, which policy losses are made of, would be of noise then.
"""

import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.config.transfers import LogprobCheck
from skyrl_actors.messages.columns import TARGETS, Columns, Example, columns_from
from skyrl_actors.messages.errors import InternalError
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import SampleOutput
from skyrl_actors.messages.weights import SCORED_FILE, SamplerWeights

PROMPT_TOKENS = 32
KEPT = 100
FAR = 10  # times the bound: weights that are not the trainer's, and no rounding
SCORING = SamplingParams(1, temperature=0.0, prompt_logprobs=True)


def fixed_prompt(vocab_size: int, max_model_len: int) -> tuple[int, ...]:
    """The same in all processes."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, min(PROMPT_TOKENS, max_model_len - 1))
    return tuple(tokens.tolist())


class Agreement:
    def __init__(self, check: LogprobCheck, bound: float, dtype: str, say: Callable[[str], None]):
        self.check = check
        self.dtype = dtype  # of the trainer, for which the bound was chosen
        self.bound = bound  # of the mean |Δ logprob|, nats
        self.differences: deque[float] = deque(maxlen=KEPT)
        self.exceeded = 0
        self._say = say
        self.prompt: tuple[int, ...] = ()

    def choose_prompt(self, vocab_size: int, max_model_len: int) -> None:
        self.prompt = fixed_prompt(vocab_size, max_model_len)

    @property
    def rows(self) -> Columns:
        tokens = np.asarray(self.prompt, np.int32)
        return columns_from([Example(tokens[:-1], {TARGETS: tokens[1:]})])

    def can_compare(self, weights: SamplerWeights) -> bool:
        """Not what was saved without a score, or with that of another prompt, of engines with other lengths, or of a trainer that
        computed in another dtype."""
        return self.check.action != "off" and weights.scored_in == self.dtype and len(weights.scored) == len(self.prompt) - 1

    def said(self, weights: SamplerWeights, logprobs: NDArray[np.float32] | None) -> SamplerWeights:
        """With what the trainer said of them; without, where that is no number."""
        if logprobs is None or not np.isfinite(logprobs).all():
            return weights
        return replace(weights, scored=tuple(logprobs.tolist()), scored_in=self.dtype)

    def notes(self, logprobs: NDArray[np.float32] | None) -> dict[str, str]:
        """What is kept in a checkpoint's folder: texts by name of file."""
        said = self.said(SamplerWeights(""), logprobs)
        kept = {"prompt": self.prompt, "logprobs": said.scored, "dtype": said.scored_in}
        return {SCORED_FILE: json.dumps(kept)} if said.scored else {}

    def remembered(self, weights: SamplerWeights, folder: Path) -> SamplerWeights:
        """With what is kept in this folder, if that is of the same prompt."""
        try:
            kept = json.loads((folder / SCORED_FILE).read_text())
            if tuple(kept["prompt"]) != self.prompt:
                return weights
            return replace(weights, scored=tuple(map(float, kept["logprobs"])), scored_in=str(kept["dtype"]))
        except (OSError, ValueError, KeyError, TypeError):
            return weights

    def compare(self, engine: str, weights: SamplerWeights, output: SampleOutput) -> None:
        """Raise InternalError beyond what the config allows."""
        if output.prompt_logprobs is None:
            return
        version = weights.version
        difference = float(np.abs(output.prompt_logprobs[1:] - np.asarray(weights.scored)).mean())
        self.differences.append(difference)
        if difference <= self.bound:
            return
        self.exceeded += 1
        text = (
            f"{engine} and the trainer differ by {difference:.2g} nats a token on {version} (logprob_check.bound {self.bound:g}): "
            "its weights did not arrive, or it computes otherwise"
        )
        if not difference <= self._most:
            raise InternalError(f"{text}; sampling from it is refused (logprob_check.action {self.check.action})")
        self._say(text)

    @property
    def _most(self) -> float:
        """What is no rounding any more: nats, beyond which nothing is sampled."""
        return {"refuse": self.bound, "auto": FAR * self.bound}.get(self.check.action, math.inf)
