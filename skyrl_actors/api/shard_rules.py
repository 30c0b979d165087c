"""Which shards a call of the controller goes to, and how their answers become one (pure).

An id names its shard. What concerns the whole service goes to all shards, and what every shard can
read, such as checkpoints, goes to any.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from skyrl_actors.api import shard_answers as answers
from skyrl_actors.controller.calls import ControllerCalls
from skyrl_actors.messages.paths import TinkerPath, shard_of

Group = Literal["first", "any", "all", "answering"]
"""first: the first shard. any: one that answers. all: every shard must answer. answering: those
that answer are enough."""
Answers = Mapping[int, Any]  # by the number of the shard
Arguments = Sequence[Any]


@dataclass(frozen=True, slots=True)
class Target:
    """Where a call goes: one shard by its number, or a group, whose answers `merged` joins.

    `or_first`: to the first shard instead, if the service no longer has that one.
    """

    where: int | Group
    merged: Callable[[Answers, Arguments], Any] | None = None
    or_first: bool = False


ANY = Target("any")
Rule = Callable[[Arguments], Target]


def of_id(arguments: Arguments) -> Target:
    """The first argument is an id."""
    return Target(shard_of(arguments[0]))


def _submit(arguments: Arguments) -> Target:
    return Target(shard_of(target_id(arguments[0])))


def target_id(request: Any) -> str:
    """Return the id of the model or sampler that a request is for."""
    model_id: str | None = getattr(request, "model_id", None)
    return request.sampler_id if model_id is None else model_id


def _open_sampler(arguments: Arguments) -> Target:
    sampler_id, session_id = arguments[:2]
    return Target(shard_of(sampler_id or session_id or ""))


def _checkpoint_spec(arguments: Arguments) -> Target:
    path: TinkerPath = arguments[0]
    return Target(shard_of(path.model_id)) if path.kind == "steps" else ANY


def _catalog(arguments: Arguments) -> Target:
    """One controller changes a run, because it puts the changes in order."""
    verb = arguments[0]
    if verb == "copy":
        return Target(shard_of(arguments[3]))
    if verb in ("set_public", "set_ttl", "delete"):
        return Target(shard_of(arguments[1].model_id), or_first=True)
    return ANY


def _known_keys(arguments: Arguments) -> Target:
    """A process without keys takes the copy of another shard, if the first one does not answer.

    An empty copy is not taken (`ShardedClient`).
    """
    return Target("first") if arguments[0] else ANY


def _session_catalog(arguments: Arguments) -> Target:
    if arguments[0] == "session":
        return Target(shard_of(arguments[1]), or_first=True)
    return Target("answering", answers.sessions)


def _fixed(where: Group, merged: Callable[[Answers, Arguments], Any] | None = None) -> Rule:
    return lambda _: Target(where, merged)


RULES: dict[str, Rule] = {
    "get_capabilities": _fixed("any"),
    "create_session": of_id,
    "heartbeat": of_id,
    "finish_session": of_id,
    "submit": _submit,
    "cancel_sample": of_id,
    "open_sampler": _open_sampler,
    "join_sampler": of_id,
    "get_sampler": of_id,
    "get_model": of_id,
    "checkpoint_spec": _checkpoint_spec,
    "catalog": _catalog,
    "session_catalog": _session_catalog,
    "retrieve": of_id,
    "fetch": of_id,
    "partial": of_id,
    "completed": of_id,
    # The first shard owns keys and limits. `SharedSettings` gives them to the others.
    "known_keys": _known_keys,
    "list_keys": _fixed("first"),
    "add_key": _fixed("first"),
    "rotate_key": _fixed("first"),
    "revoke_key": _fixed("first"),
    "take_keys": _fixed("first"),
    "list_quotas": _fixed("first"),
    "set_quota": _fixed("first"),
    "take_quotas": _fixed("first"),
    # A sum without a shard would be too small.
    "usage": _fixed("all", answers.concatenated),
    "owner_named": _fixed("first"),
    "owner_names": _fixed("answering", answers.union),
    "list_requests": _fixed("answering", answers.oldest_requests),
    "end_session": of_id,
    "cancel_request": of_id,
    "list_failures": _fixed("answering", answers.newest_failures),
    "history": _fixed("answering", answers.history),
    "metrics": _fixed("answering", answers.metrics),
    "get_mode": _fixed("first"),
    "set_mode": _fixed("all", answers.first),
    "note_access": _fixed("any"),
    "audit": _fixed("all", answers.newest_acts),
    "fault": _fixed("any"),  # `ShardedClient` returns the first good news
    "status": _fixed("answering", answers.status),
    "spans": _fixed("answering", answers.spans),
}


def target_of(method: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Target:
    """Return where a call of a method of `ControllerCalls` goes."""
    if named:
        arguments = _signature(method).bind(None, *arguments, **named).args[1:]
    return RULES[method](arguments)


@cache
def _signature(method: str) -> inspect.Signature:
    return inspect.signature(getattr(ControllerCalls, method))
