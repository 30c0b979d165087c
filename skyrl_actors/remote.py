"""Awaiting remote calls with a deadline that says who was missing, and with our own errors as they were raised."""

import asyncio
from collections.abc import Sequence
from typing import Any

from ray import ObjectRef
from ray.exceptions import RayActorError, RayError, RayTaskError

from skyrl_actors.messages.errors import InternalError, SkyrlActorsError


class ActorDied(InternalError):
    """A process that the work needs is gone."""


async def gather(refs: Sequence[ObjectRef], names: Sequence[str], what: str, timeout_s: float) -> list[Any]:
    """Results in order. Errors of many actors become one; a deadline names the actors that did not answer."""
    tasks = [asyncio.ensure_future(settled(ref)) for ref in refs]
    try:
        _, pending = await asyncio.wait(tasks, timeout=timeout_s)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        raise
    if pending:
        missing = [name for name, task in zip(names, tasks, strict=True) if task in pending]
        for task in pending:
            task.cancel()
        raise InternalError(f"{what}: no answer within {timeout_s:.0f} s from {', '.join(missing)}")
    errors = {name: task.exception() for name, task in zip(names, tasks, strict=True) if task.exception()}
    if errors:
        raise merged(errors, what)
    return [task.result() for task in tasks]


async def settled(ref: ObjectRef) -> Any:
    """The result of one call. Our own errors come back as they were raised, everything else as InternalError."""
    try:
        return await ref
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, SkyrlActorsError):
            raise cause from None
        raise InternalError(f"{type(cause).__name__}: {cause}\n{error}") from None
    except RayActorError as error:
        raise ActorDied(f"the actor died: {error}") from None
    except RayError as error:
        raise InternalError(f"{type(error).__name__}: {error}") from None


def merged(errors: dict[str, BaseException | None], what: str) -> BaseException:
    """One error for many: the same one from several ranks is said once, with all their names."""
    kinds: dict[str, list[str]] = {}
    for name, error in errors.items():
        kinds.setdefault(str(error), []).append(name)
    first = next(iter(errors.values()))
    if len(kinds) == 1 and isinstance(first, SkyrlActorsError) and first.category == "user":
        return first
    return InternalError("; ".join(f"{what} on {', '.join(names)}: {text}" for text, names in kinds.items()))
