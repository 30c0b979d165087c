"""Do engine and trainer agree? One fixed prompt, scored by the trainer when a version is saved and by each engine before it
first answers from it. What the trainer said stays with the version: in the journal, and in a named checkpoint's folder.

What differs beyond the bound is weights that arrived wrong, or two programs that compute otherwise: ratios of new to old
probabilities, which policy losses are made of, would be of noise then.
"""

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np

from skyrl_actors.config.transfers import LogprobCheck
from skyrl_actors.messages.columns import TARGETS, Columns, Example, columns_from
from skyrl_actors.messages.errors import InternalError
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import SampleOutput
from skyrl_actors.messages.weights import SCORED_FILE, SamplerWeights

PROMPT_TOKENS = 32
KEPT = 100
SCORING = SamplingParams(1, temperature=0.0, prompt_logprobs=True)


class Agreement:
    def __init__(self, check: LogprobCheck, bound: float, say: Callable[[str], None]):
        self.check = check
        self.bound = bound  # of the mean |Δ logprob|, nats
        self.differences: deque[float] = deque(maxlen=KEPT)
        self.exceeded = 0
        self._say = say
        self.prompt: tuple[int, ...] = ()

    def choose_prompt(self, vocab_size: int, max_model_len: int) -> None:
        self.prompt = tuple(np.random.default_rng(0).integers(0, vocab_size, min(PROMPT_TOKENS, max_model_len - 1)).tolist())

    @property
    def rows(self) -> Columns:
        tokens = np.asarray(self.prompt, np.int32)
        return columns_from([Example(tokens[:-1], {TARGETS: tokens[1:]})])

    def can_compare(self, weights: SamplerWeights) -> bool:
        """Not what was saved without a score, or with that of another prompt, of engines with other lengths."""
        return self.check.action != "off" and len(weights.scored) == len(self.prompt) - 1

    def notes(self, scored: tuple[float, ...]) -> dict[str, str]:
        """What is kept in a checkpoint's folder: texts by name of file."""
        return {SCORED_FILE: json.dumps({"prompt": self.prompt, "logprobs": scored})} if scored else {}

    def kept_in(self, folder: Path) -> tuple[float, ...]:
        """Nothing where there is none, or of another prompt."""
        try:
            kept = json.loads((folder / SCORED_FILE).read_text())
            return tuple(map(float, kept["logprobs"])) if tuple(kept["prompt"]) == self.prompt else ()
        except (OSError, ValueError, KeyError, TypeError):
            return ()

    def compare(self, engine: str, weights: SamplerWeights, output: SampleOutput) -> None:
        """Raises InternalError beyond the bound where the config says "refuse"."""
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
        if self.check.action == "refuse":
            raise InternalError(text)
        self._say(text)
