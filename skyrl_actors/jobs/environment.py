"""What an environment is: an episode of one or more turns of text, and the task sets that open episodes.

Write your own by implementing `Environment`; blocking code goes through `in_thread`, since all episodes share one event loop.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Message = Mapping[str, str]  # {"role": "user", "content": "…"}


@dataclass(frozen=True, slots=True)
class Step:
    """What an answer came to. `messages` follow it where the episode goes on."""

    reward: float
    done: bool = True
    messages: Sequence[Message] = ()


class Environment(Protocol):
    """One episode; used by one task at a time. What it raises drops the episode, and is counted."""

    async def start(self) -> Sequence[Message]:
        """The chat that the model is to go on with."""
        ...

    async def step(self, answer: str) -> Step: ...

    async def close(self) -> None: ...


class Task(Protocol):
    """What episodes can be opened of, several of the same."""

    @property
    def question(self) -> str: ...

    @property
    def answer(self) -> str:
        """What would have been right, to show beside samples; "" where there is no such thing."""
        ...

    def open(self) -> Environment: ...


class TaskSet(Protocol):
    @property
    def evaluation(self) -> Sequence[Task]: ...

    def batch(self, count: int, number: int) -> Sequence[Task]:
        """`count` tasks to train on; batches are numbered from 0, and the same number gives the same. None of the evaluation's."""
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


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call blocking code in a thread of its own: one that never returns costs a thread, and neither a pool nor the program's end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        if not done.done():
            set_it(value)

    def run() -> None:
        try:
            outcome, set_it = function(*arguments), done.set_result
        except BaseException as error:  # noqa: BLE001 (handed to who waits)
            # SystemExit would end the event loop of who waits.
            outcome = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
            set_it = done.set_exception
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, set_it, outcome)

    threading.Thread(target=run, daemon=True, name=f"env-{getattr(function, '__name__', 'call')}").start()
    return await done
