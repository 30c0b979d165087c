"""The interface of environments: episodes of one or more turns, tasks and task sets.

To write your own, implement `Environment`. All episodes share one event loop, so call blocking
code through `in_thread`.
"""

import asyncio
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import numpy as np

T = TypeVar("T")
# {"role": "user", "content": "…"}. For images the content is a list of parts, such as
# {"type": "text", "text": "…"} and {"type": "image", "image": PNG or JPEG as bytes}.
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """The result of an answer. If the episode continues, `messages` come after the answer."""

    reward: float
    done: bool = True
    messages: Sequence[Message] = ()


class Environment(Protocol):
    """One episode. Only one asyncio task uses it at a time.

    If a method raises an error, the episode is dropped and counted as failed.
    """

    async def start(self) -> Sequence[Message]:
        """Return the chat that the model answers."""
        ...

    async def step(self, answer: str) -> Step:
        """Score an answer of the model, and return the messages that come after it."""
        ...

    async def close(self) -> None:
        """Release what the episode holds. This is called once, also after an error."""
        ...


class Task(Protocol):
    """A question to the model. Several episodes can be opened for one task."""

    @property
    def question(self) -> str:
        """The question, to show next to samples."""
        ...

    @property
    def answer(self) -> str:
        """The right answer, to show next to samples; "" if there is none."""
        ...

    def open(self) -> Environment:
        """Start a new episode."""
        ...


class TaskSet(Protocol):
    """The tasks of a job, for training and for evaluation."""

    @property
    def evaluation(self) -> Sequence[Task]:
        """The tasks of every evaluation. They are not trained on."""
        ...

    def batch(self, count: int, number: int) -> Sequence[Task]:
        """Return `count` tasks to train on, without the tasks of the evaluation.

        Batches are numbered from 0. The same number always returns the same tasks.
        """
        ...


class SingleTurn:
    """An episode that ends with the first answer."""

    def __init__(self, messages: Sequence[Message], score: Callable[[str], float]):
        self._messages = messages
        self._score = score

    async def start(self) -> Sequence[Message]:
        return self._messages

    async def step(self, answer: str) -> Step:
        return Step(self._score(answer))

    async def close(self) -> None:
        pass


def check_reward(reward: object) -> None:
    """Raise TypeError or ValueError for a reward of the user's code that is no finite number."""
    if not isinstance(reward, int | float | np.number):
        shown = f"{str(reward)[:80]!r} of type {type(reward).__name__}"
        raise TypeError(f"the reward was {shown}; a number is needed")
    if not math.isfinite(cast(float, reward)):
        raise ValueError(f"the reward was {reward}; a finite number is needed")


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call blocking code in a new thread, and wait for its result.

    Each call has its own daemon thread. A call that never returns therefore blocks neither a
    thread pool nor the exit of the program.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        if not done.done():
            set_it(value)

    def run() -> None:
        try:
            outcome, set_it = function(*arguments), done.set_result
        except BaseException as error:  # noqa: BLE001 (the future passes it to the caller)
            # SystemExit would end the caller's event loop, and a future takes no StopIteration.
            outcome = (
                error
                if isinstance(error, Exception) and not isinstance(error, StopIteration)
                else RuntimeError(f"{type(error).__name__}: {error}")
            )
            set_it = done.set_exception
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, set_it, outcome)

    threading.Thread(
        target=run, daemon=True, name=f"env-{getattr(function, '__name__', 'call')}"
    ).start()
    return await done
