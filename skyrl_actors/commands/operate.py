"""Commands for operators: list sessions, models and requests; end, cancel, pause, drain, resume."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from skyrl_actors.api.client import ControllerClient
from skyrl_actors.commands.asking import actor, asked, seconds_in, time_text
from skyrl_actors.commands.controllers import running_client
from skyrl_actors.commands.serve import join, read_status
from skyrl_actors.commands.terminal import console, note, show_rows
from skyrl_actors.controller.calls import ControllerCalls
from skyrl_actors.messages.catalog import SessionEntry
from skyrl_actors.messages.operating import FailedRequest, Mode, OpenRequest
from skyrl_actors.messages.paths import owner_of

POLL_S = 1.0
MEANINGS: dict[Mode, str] = {
    "running": "requests are accepted and started",
    "paused": "requests are accepted and wait; `resume` starts them",
    "draining": "no new requests are accepted; `resume` accepts them again",
}


def _print(title: str, rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        show_rows(title, rows)


def sessions(every: bool, as_json: bool, service: str) -> None:
    """List sessions, newest first."""

    async def found(calls: ControllerCalls) -> tuple[list[SessionEntry], dict[str, str]]:
        entries = await calls.session_catalog("sessions", None)
        assert isinstance(entries, list)
        return entries, await calls.owner_names()

    entries, names = asked(service, found)
    rows = [
        {
            "session": entry.note.session_id,
            "tenant": names.get(owner_of(entry.note.session_id), owner_of(entry.note.session_id)),
            "state": entry.status or "no heartbeat",
            "opened": time_text(entry.note.created_at),
            "name": entry.note.display_name,
            "models": len(entry.run_ids),
            "samplers": len(entry.sampler_ids),
            "checkpoints": entry.num_checkpoints,
            "bytes": entry.num_bytes,
        }
        for entry in entries
        if every or entry.status == "active"
    ]
    _print("sessions", rows, as_json)


def models(as_json: bool, service: str) -> None:
    """List models with their tenants and queued requests."""
    content = read_status(service)
    queued: dict[str, int] = content["queued"]
    rows = [{**one, "queued": queued.get(one["model_id"], 0)} for one in content["models"]]
    _print("models", rows, as_json)


def requests(tenant: str | None, last: int, as_json: bool, service: str) -> None:
    """List open requests, oldest first."""

    async def found(calls: ControllerCalls) -> tuple[list[OpenRequest], dict[str, str]]:
        names = await calls.owner_names()
        return await calls.list_requests(_owner(tenant, names), last), names

    open_requests, names = asked(service, found)
    rows = [
        {
            "request": one.request_id,
            "kind": one.kind,
            "of": one.target,
            "tenant": names.get(one.owner, one.owner),
            "state": "running" if one.is_running else "waiting",
            "seconds": round(one.age_s, 1),
            "bytes": one.num_bytes,
        }
        for one in open_requests
    ]
    _print("open requests", rows, as_json)


def failures(tenant: str | None, last: int, as_json: bool, service: str) -> None:
    """List failed requests, newest first."""

    async def found(calls: ControllerCalls) -> tuple[list[FailedRequest], dict[str, str]]:
        names = await calls.owner_names()
        return await calls.list_failures(_owner(tenant, names), last), names

    failed, names = asked(service, found)
    rows = [
        {
            "at": time_text(one.at),
            "tenant": names.get(one.owner, one.owner),
            "kind": one.kind,
            "of": one.target,
            "fault of": one.category,
            "message": one.message,
            "request": one.request_id,
        }
        for one in failed
    ]
    _print("failures", rows, as_json)


def _owner(tenant: str | None, names: dict[str, str]) -> str | None:
    """Return the owner of a name, or the text itself, which may be an owner."""
    owners = {name: owner for owner, name in names.items()}
    return None if tenant is None else owners.get(tenant, tenant)


def end(session: str, service: str) -> None:
    """End a session."""
    asked(service, lambda calls: calls.end_session(session, actor()))
    console.print(f"ended {session}; a model whose request runs is freed after it")


def cancel(request: str, service: str) -> None:
    """Let an open request fail."""
    if asked(service, lambda calls: calls.cancel_request(request, actor())):
        console.print(f"cancelled {request}")
    else:
        note(
            f"{request} fails after the running request of its model; if the controller restarts "
            "before, cancel it again"
        )


def set_mode(mode: Mode, service: str) -> None:
    """Pause, drain or resume the service."""
    before = asked(service, lambda calls: calls.set_mode(mode, actor()))
    console.print(f"{mode} (before: {before}): {MEANINGS[mode]}")


def mode_of(service: str) -> Mode:
    """Return whether the service accepts requests, is paused or is drained."""
    return asked(service, lambda calls: calls.get_mode())


def drain(timeout: str, service: str) -> bool:
    """Drain the service. Return whether all accepted requests are answered."""
    timeout_s = seconds_in(timeout)
    set_mode("draining", service)
    if not timeout_s:
        return True
    join(service)
    try:
        left = asyncio.run(_until_idle(running_client(service), timeout_s))
    except KeyboardInterrupt:
        note("the service goes on draining; `skyrl-actors resume` ends that")
        raise
    if left:
        console.print(f"after {timeout}: {left}; `requests` lists those that are open")
    else:
        console.print("no request is open: the service can be stopped or upgraded")
    return not left


async def _until_idle(client: ControllerClient, timeout_s: float) -> str:
    """Wait until no request is open or the time has passed. Return what is left, or nothing."""
    loop = asyncio.get_running_loop()
    until, shown = loop.time() + timeout_s, ""
    while (left := still_open(await client.once.status())) and loop.time() < until:
        if left != shown:
            note(left)
            shown = left
        await asyncio.sleep(POLL_S)
    return left


def still_open(status: dict[str, Any]) -> str:
    """Return how many requests are open, and which shards do not tell; nothing if all are idle."""
    shards: list[dict[str, Any]] = status.get("shards", [])
    unknown = [f"shard {one['shard']} does not answer" for one in shards if not one["ready"]]
    count = int(status["open_requests"])
    return "; ".join([*([f"{count} requests are open"] if count else ()), *unknown])
