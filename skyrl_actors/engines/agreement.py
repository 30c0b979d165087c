"""Do engine and trainer agree? One fixed prompt, scored by the trainer when a version is frozen and by each engine before it
first answers from it.

What differs beyond the bound is weights that arrived wrong, or two programs that compute otherwise: ratios of new to old
probabilities, which policy losses are made of, would be of noise then.
"""

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.config.transfers import LogprobCheck
from skyrl_actors.messages.columns import TARGETS, Columns, Example, columns_from
from skyrl_actors.messages.errors import InternalError
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import SampleOutput

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
        self._expected: dict[str, NDArray[np.float32]] = {}  # [PROMPT_TOKENS - 1], by version
        self.prompt: tuple[int, ...] = ()

    def choose_prompt(self, vocab_size: int, max_model_len: int) -> None:
        self.prompt = tuple(np.random.default_rng(0).integers(0, vocab_size, min(PROMPT_TOKENS, max_model_len - 1)).tolist())

    @property
    def rows(self) -> Columns:
        tokens = np.asarray(self.prompt, np.int32)
        return columns_from([Example(tokens[:-1], {TARGETS: tokens[1:]})])

    def expect(self, version: str, logprobs: NDArray[np.float32]) -> None:
        self._expected[version] = logprobs

    def knows(self, version: str) -> bool:
        return version in self._expected

    def forget(self, version: str) -> None:
        self._expected.pop(version, None)

    def compare(self, engine: str, version: str, output: SampleOutput) -> None:
        """Raises InternalError beyond the bound where the config says "refuse"."""
        if version not in self._expected or output.prompt_logprobs is None:
            return
        difference = float(np.abs(output.prompt_logprobs[1:] - self._expected[version]).mean())
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
