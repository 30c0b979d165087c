"""Try the tasks of a job once, before any process starts.

Rewards and environments are code of the user. A mistake in it would otherwise show after models and
engines were loaded, and only as the share of episodes that failed.
"""

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import skyrl_actors
from skyrl_actors.jobs.chat import Chat
from skyrl_actors.jobs.chat_messages import images_in, normal_messages
from skyrl_actors.jobs.environment import Task, TaskSet, check_reward
from skyrl_actors.messages.errors import ConfigError

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, None]], None]
TRIED = 3  # tasks; one that works is enough, because single rows may be bad
ANSWER = "an answer"  # where a task has none
OWN = Path(skyrl_actors.__file__).parent


def try_tasks(
    tasks: TaskSet, chat: Chat, timeout_s: float, what: str, run: Run = asyncio.run
) -> None:
    """Play an episode of one task with its own answer.

    `what` names the code in errors. `run` uses the event loop of the job, because clients that the
    code opens belong to that loop.

    Raises:
        ConfigError: The episodes of the first tasks all failed; with the lines of the user's code.
    """
    tried = tasks.evaluation[:TRIED]
    for task in tried:
        try:
            run(_play(task, chat, timeout_s))
        except Exception as error:  # noqa: BLE001  code of the user may raise anything
            if task is not tried[-1]:
                continue
            raise ConfigError(
                f"{what} failed for {len(tried)} of {len(tried)} rows, before anything was "
                f"started:\n{_shown(error)}"
            ) from None
        return


async def _play(task: Task, chat: Chat, timeout_s: float) -> None:
    environment = task.open()
    try:
        messages = normal_messages(await _within(timeout_s, "start", environment.start()))
        chat.check_images(images_in(messages))
        chat.prompt(messages)
        step = await _within(timeout_s, "step", environment.step(task.answer or ANSWER))
        check_reward(step.reward)
    finally:
        await _within(timeout_s, "close", environment.close())


async def _within(timeout_s: float, what: str, call: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError as error:
        raise TimeoutError(f"{what} took longer than env.timeout_s {timeout_s:g} s") from error


def _shown(error: BaseException) -> str:
    """Return the error with the lines of the user's code that led to it."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if OWN not in Path(frame.filename).parents and Path(frame.filename).parent.name != "asyncio"
    ]
    lines = traceback.format_list(frames) + traceback.format_exception_only(error)
    return "".join(lines).rstrip()
