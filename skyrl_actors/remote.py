"""Await remote calls with a deadline, and find, start and end named actors.

A missed deadline names the actors that did not answer. The project's own errors arrive unchanged.
"""

import asyncio
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar, cast

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.experimental import internal_kv

from skyrl_actors.messages.errors import (
    CollectiveFailed,
    InternalError,
    SkyrlActorsError,
    StateLost,
    WeightsGone,
)

log = logging.getLogger(__name__)
Method = TypeVar("Method", bound=Callable[..., Any])
T = TypeVar("T")
Actors = Mapping[str, ActorHandle[Any]]  # living ones, by name
NAMESPACE = "skyrl-actors"
NAME_FREE_S = 20.0
# Questions to Ray's server wait here while it is away, and nothing else waits for their threads.
QUESTIONS = ThreadPoolExecutor(4, thread_name_prefix="ray")
ANSI_COLOR = re.compile(r"\x1b\[[0-9;]*m")


class TypedUtil(Protocol):
    """Functions of ray.util, with the types that its own annotations leave out."""

    def get_node_ip_address(self) -> str: ...

    def list_named_actors(self, **options: bool) -> list[dict[str, str]]: ...


class TypedContext(Protocol):
    """What Ray knows about this process, with the types that its own annotations leave out."""

    @property
    def gcs_address(self) -> str: ...

    def get_node_id(self) -> str: ...

    def get_session_name(self) -> str: ...


class TypedRay(Protocol):
    """Functions of Ray, with the types that its own annotations leave out."""

    util: TypedUtil

    def get(self, ref: ObjectRef[Any], *, timeout: float) -> Any: ...

    def put(self, value: Any) -> ObjectRef[Any]: ...

    def get_actor(self, name: str, namespace: str | None = None) -> ActorHandle[Any]: ...

    def kill(self, actor: ActorHandle[Any], **options: bool) -> None: ...

    def cancel(self, ref: ObjectRef[Any]) -> None: ...

    def method(self, **options: str) -> Callable[[Method], Method]: ...

    def init(self, address: str | None = None, **options: Any) -> object: ...

    def nodes(self) -> list[dict[str, Any]]: ...

    def shutdown(self) -> None: ...

    def get_runtime_context(self) -> TypedContext: ...


typed_ray = cast(TypedRay, ray)
key_values = cast(Any, internal_kv)  # its functions have private names only


class ActorDied(StateLost):
    """A process that the call needs is gone."""


class Overdue(StateLost):
    """Some actors did not answer in time. `missing` names them."""

    missing: tuple[str, ...] = ()


class NoAnswer(InternalError):
    """An actor did not answer in time."""


async def ask(question: Callable[..., T], *arguments: Any) -> T:
    """Ask Ray's server in a thread, because this waits while the server is away."""
    return await asyncio.get_running_loop().run_in_executor(QUESTIONS, question, *arguments)


async def ended(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel these tasks and wait until they have ended."""
    some = [task for task in tasks if task is not None]
    for task in some:
        task.cancel()
    await asyncio.gather(*some, return_exceptions=True)


async def gather(
    refs: Sequence[ObjectRef[Any]], names: Sequence[str], what: str, timeout_s: float
) -> list[Any]:
    """Return the results in order.

    Errors of several actors become one. A missed deadline raises Overdue with the names of the
    actors.
    """
    return joined(await outcomes(refs, timeout_s), names, what, timeout_s)


async def outcomes(refs: Sequence[ObjectRef[Any]], timeout_s: float) -> list[Any]:
    """Return the result or the error of each call: NoAnswer for one that is late."""
    if not refs:
        return []
    tasks = [asyncio.ensure_future(settled(ref)) for ref in refs]
    try:
        _, pending = await asyncio.wait(tasks, timeout=timeout_s)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        raise
    for task in pending:
        task.cancel()
    return [NoAnswer() if task in pending else task.exception() or task.result() for task in tasks]


def joined(found: Sequence[Any], names: Sequence[str], what: str, timeout_s: float) -> list[Any]:
    """Return the results that `outcomes` found, or raise its errors as one."""
    named_outcomes = list(zip(names, found, strict=True))
    if missing := [name for name, outcome in named_outcomes if isinstance(outcome, NoAnswer)]:
        overdue = Overdue(f"{what}: no answer within {timeout_s:g} s from {', '.join(missing)}")
        overdue.missing = tuple(missing)
        raise overdue
    errors: dict[str, BaseException | None] = {
        name: outcome for name, outcome in named_outcomes if isinstance(outcome, BaseException)
    }
    if errors:
        raise merged(errors, what)
    return list(found)


async def settled(ref: ObjectRef[Any]) -> Any:
    """Return the result of one call.

    The project's own errors are raised unchanged, all others as InternalError.
    """
    try:
        return await ref
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, SkyrlActorsError):
            raise cause from None
        raise InternalError(f"{type(cause).__name__}: {cause}\n{error}") from None
    except RayActorError as error:
        raise ActorDied(f"the actor died: {cause_of_death(str(error))}") from None
    except RayError as error:
        raise InternalError(f"{type(error).__name__}: {error}") from None


def cause_of_death(text: str) -> str:
    """Return the line of Ray's text that names the cause.

    When a constructor fails, Ray puts the actor's name first and the exception last.
    """
    lines = [line for line in ANSI_COLOR.sub("", text).splitlines() if line.strip()]
    return lines[-1 if "creation task" in lines[0] else 0].strip()


def merged(errors: dict[str, BaseException | None], what: str) -> BaseException:
    """Merge errors of several actors. Equal texts appear once, with the names of their actors."""
    kinds: dict[str, list[str]] = {}
    for name, error in errors.items():
        kinds.setdefault(str(error), []).append(name)
    first = next(iter(errors.values()))
    if all(isinstance(e, SkyrlActorsError) and e.category == "user" for e in errors.values()):
        assert first is not None
        return first  # ranks can refuse different rows of one request
    text = "; ".join(f"{what} on {', '.join(names)}: {text}" for text, names in kinds.items())
    for kind in (CollectiveFailed, ActorDied, StateLost, WeightsGone):
        if any(isinstance(error, kind) for error in errors.values()):
            return kind(text)
    return InternalError(text)


def node_address() -> str:
    """Return the address of this process's machine, as Ray knows it."""
    return typed_ray.util.get_node_ip_address()


def named(name: str) -> ActorHandle[Any] | None:
    """Return the living actor of this name, or None."""
    try:
        return typed_ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def names_with(prefix: str) -> list[str]:
    """Return the names of living actors that start with `prefix`."""
    entries = typed_ray.util.list_named_actors(all_namespaces=True)
    return [
        e["name"] for e in entries if e["namespace"] == NAMESPACE and e["name"].startswith(prefix)
    ]


def living(prefix: str) -> Actors:
    """Return the living actors whose names start with `prefix`.

    As long as a process has these handles, it can call them without Ray's server.
    """
    found = {name: named(name) for name in names_with(prefix)}
    return {name: actor for name, actor in found.items() if actor is not None}


async def make_named(actor_class: Any, *arguments: Any) -> ActorHandle[Any]:
    """Create a named actor. Raises InternalError when the name is taken."""
    try:
        return await ask(lambda: actor_class.remote(*arguments))
    except ValueError as error:
        raise InternalError(f"an actor's name is still taken: {error}") from None


async def publish(service: str, content: dict[str, str] | None) -> None:
    """Publish a service's address in this Ray cluster; None removes it.

    The service works without it, so a failure is only logged.
    """
    try:
        if content is None:
            await ask(lambda: key_values._internal_kv_del(service, namespace=NAMESPACE))
        else:
            text = json.dumps(content)
            await ask(lambda: key_values._internal_kv_put(service, text, namespace=NAMESPACE))
    except RayError as error:
        log.warning("the address of %s was not published: %s", service, error)


def published(service: str) -> dict[str, str] | None:
    """Return what a service of this Ray cluster published, or None."""
    content: bytes | None = key_values._internal_kv_get(service, namespace=NAMESPACE)
    return json.loads(content) if content else None


def is_same(found: Any, wanted: Any) -> bool:
    """Return whether a spec from another process equals this one.

    A process of another version can send one that lacks a field.
    """
    try:
        return bool(found == wanted)
    except AttributeError:
        return False


async def end_named(names: Sequence[str]) -> None:
    """Kill the actors of these names and wait until the names are free again."""
    for name in names:
        actor = await ask(named, name)
        if actor is not None:
            typed_ray.kill(actor)
    deadline = asyncio.get_running_loop().time() + NAME_FREE_S
    while taken := [name for name in names if await ask(named, name) is not None]:
        # Ray has no event for a free name. It takes milliseconds.
        if asyncio.get_running_loop().time() > deadline:
            raise InternalError(f"{', '.join(taken)} did not end within {NAME_FREE_S:.0f} s")
        await asyncio.sleep(0.02)


async def end_all(prefix: str) -> None:
    """Kill the actors whose names start with `prefix`, and wait until the names are free again."""
    await end_named(await ask(names_with, prefix))
