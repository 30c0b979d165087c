"""A verifiable task (pure): words to write backwards, with noisy demonstrations for a first supervised warm-up."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from skyrl_actors.config.environments import ReverseEnv
from skyrl_actors.jobs.environment import Environment, SingleTurn

LETTERS = "abcdefghijkl"
RIGHT_SHARE, COPY_SHARE = 0.25, 0.5  # of the demonstrations; the others get one letter wrong


@dataclass(frozen=True, slots=True)
class ReverseTask:
    question: str  # the user's turn of the chat
    answer: str

    def reward(self, text: str) -> float:
        return float(text == self.answer)

    def open(self) -> Environment:
        return SingleTurn(({"role": "user", "content": self.question},), self.reward)


class ReverseTasks:
    """The evaluation words are drawn first and never come up in training."""

    def __init__(self, config: ReverseEnv, seed: int):
        self.config = config
        self.seed = seed
        rng = random.Random(f"reverse evaluation {seed}")
        possible = sum(len(LETTERS) ** n for n in range(config.min_letters, config.max_letters + 1))
        held_out: dict[str, None] = {}
        while len(held_out) < min(config.eval_prompts, possible // 2):
            held_out[self._word(rng)] = None
        self.evaluation = [_reverse(word) for word in held_out]
        self._held_out = held_out

    def _word(self, rng: random.Random) -> str:
        length = rng.randint(self.config.min_letters, self.config.max_letters)
        return "".join(rng.choice(LETTERS) for _ in range(length))

    def batch(self, count: int, number: int) -> list[ReverseTask]:
        """Batch `number` of this seed."""
        rng = random.Random(f"reverse training {self.seed * 100_003 + number}")
        words = (self._word(rng) for _ in iter(int, 1))
        return [_reverse(word) for word, _ in zip((w for w in words if w not in self._held_out), range(count), strict=False)]


def _reverse(word: str) -> ReverseTask:
    return ReverseTask(f"Reverse: {word}", word[::-1])


def noisy_demonstrations(count: int, seed: int) -> Iterator[ReverseTask]:
    """Chats in which most answers are wrong: enough to speak the format, with the skill still to be learned."""
    tasks = ReverseTasks(ReverseEnv(), seed=0)
    rng = random.Random(f"demonstrations {seed}")
    for task in tasks.batch(count, 1_000_003 + seed):
        draw, i = rng.random(), rng.randrange(len(task.answer))
        if draw < RIGHT_SHARE:
            answer = task.answer
        elif draw < RIGHT_SHARE + COPY_SHARE:
            answer = task.answer[::-1]
        else:
            answer = task.answer[:i] + rng.choice(LETTERS) + task.answer[i + 1 :]
        yield ReverseTask(task.question, answer)
