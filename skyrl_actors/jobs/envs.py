"""Verifiable tasks (pure): prompts, exact-match rewards, and noisy demonstrations for a first supervised warm-up."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from skyrl_actors.config.job import ReverseEnv

LETTERS = "abcdefghijkl"
RIGHT_SHARE, COPY_SHARE = 0.25, 0.5  # of the demonstrations; the others get one letter wrong


@dataclass(frozen=True, slots=True)
class Task:
    question: str  # the user's turn of the chat
    answer: str

    def reward(self, text: str) -> float:
        return float(text == self.answer)


class ReverseTasks:
    """Words to write backwards. The evaluation words are drawn first and never come up in training."""

    def __init__(self, config: ReverseEnv, seed: int):
        self.config = config
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

    def batch(self, count: int, seed: int) -> list[Task]:
        """`count` training tasks, the same for the same seed."""
        rng = random.Random(f"reverse training {seed}")
        words = (self._word(rng) for _ in iter(int, 1))
        return [_reverse(word) for word, _ in zip((w for w in words if w not in self._held_out), range(count), strict=False)]


def _reverse(word: str) -> Task:
    return Task(f"Reverse: {word}", word[::-1])


def noisy_demonstrations(count: int, seed: int) -> Iterator[Task]:
    """Chats in which most answers are wrong: enough to speak the format, with the skill still to be learned."""
    tasks = ReverseTasks(ReverseEnv(), seed=0)
    rng = random.Random(f"demonstrations {seed}")
    for task in tasks.batch(count, seed=1_000_003 + seed):
        draw, i = rng.random(), rng.randrange(len(task.answer))
        if draw < RIGHT_SHARE:
            answer = task.answer
        elif draw < RIGHT_SHARE + COPY_SHARE:
            answer = task.answer[::-1]
        else:
            answer = task.answer[:i] + rng.choice(LETTERS) + task.answer[i + 1 :]
        yield Task(task.question, answer)
