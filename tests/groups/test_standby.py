"""The standby process without Ray: when it can be taken, and when a successor starts."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_actors import remote
from skyrl_actors.config.restart import RestartConfig
from skyrl_actors.groups import standby as module
from skyrl_actors.groups.standby import Standby
from skyrl_actors.messages.errors import InternalError
from skyrl_actors.supervision import backoff
from skyrl_actors.transport.handshake import PROTOCOL_VERSION
from skyrl_actors.workers.interface import RankStatus

SLOT = 3


class Process:
    """An actor whose start and death the test decides."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.warmed, self.ended = loop.create_future(), loop.create_future()
        self.killed = False
        self.warm = SimpleNamespace(remote=lambda folder, with_jax: self.warmed)
        self.watch = SimpleNamespace(remote=lambda: self.ended)

    def die(self) -> None:
        self.ended.set_exception(InternalError("killed by signal 9"))


class Machine:
    """Create processes in place of Ray."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.made: list[Process] = []
        self._loop = asyncio.get_running_loop()  # actors are created in threads
        self.said: list[str] = []
        self.settled = asyncio.Event()
        self.settled.set()
        monkeypatch.setattr(module, "worker_class", lambda kind: self)
        monkeypatch.setattr(module, "PlacementGroupSchedulingStrategy", lambda *a, **k: None)
        monkeypatch.setattr(module, "PAUSE_S", 0.0)
        monkeypatch.setattr(backoff, "BACKOFF_S", 0.0)
        monkeypatch.setattr(remote, "gather", self._gather)
        monkeypatch.setattr(remote, "settled", self._settled)
        monkeypatch.setattr(remote, "names_with", lambda prefix: [])
        monkeypatch.setattr(remote.typed_ray, "kill", lambda p: setattr(p, "killed", True))

    def options(self, **options: Any) -> "Machine":
        return self

    def remote(self, spec: None) -> Process:
        self.made.append(Process(self._loop))
        return self.made[-1]

    @staticmethod
    async def _gather(refs: list[Awaitable[None]], *rest: Any) -> list[None]:
        return [await ref for ref in refs]

    @staticmethod
    async def _settled(ref: Awaitable[None]) -> None:
        await ref

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110  the state is another object's
                await asyncio.sleep(0.001)


@pytest.fixture
async def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def with_environment(environment: dict[str, str]) -> Standby:
    return Standby(
        "s",
        "/base",
        None,  # type: ignore[arg-type]
        SLOT,
        environment,
        1,
        True,
        RestartConfig(),
        print,
        _settled,
    )


def running(of: Standby, **status: Any) -> tuple[Process, Any]:
    """Return a process of an earlier controller with this status, and the actors that live."""
    loop = asyncio.get_running_loop()
    process, answer = Process(loop), loop.create_future()
    answer.set_result(
        RankStatus(spec=None, info=None, applied={}, pid=1, log_file="/dev/null", **status)
    )
    process.adopt = SimpleNamespace(remote=lambda epoch: answer)  # type: ignore[attr-defined]
    return process, {f"{of._own_prefix}1": process, "s:policy:0": None}


async def test_a_process_of_another_environment_is_not_taken_over(machine: Machine):
    old = with_environment({"NCCL_DEBUG": "INFO"})
    new = with_environment({"NCCL_DEBUG": "WARN"})
    process, actors = running(old)
    assert await old.take_over(actors) and not process.killed
    assert not await new.take_over(actors) and process.killed
    await old.detach()


async def test_a_process_of_another_version_is_not_taken_over(machine: Machine):
    """It would run the old code as a rank of the new service."""
    standby = with_environment({})
    process, actors = running(standby, protocol=PROTOCOL_VERSION - 1)
    assert not await standby.take_over(actors) and process.killed


async def _settled() -> None: ...


@pytest.fixture
async def standby(machine: Machine) -> AsyncIterator[Standby]:
    made = Standby(
        "s",
        "base",
        None,  # type: ignore[arg-type]
        SLOT,
        {},
        1,
        False,
        RestartConfig(max_in_a_row=2),
        machine.said.append,
        machine.settled.wait,
    )
    made.start_later()
    yield made
    await made.detach()


async def warm(machine: Machine, standby: Standby, number: int) -> Process:
    await machine.until(lambda: len(machine.made) > number)
    machine.made[number].warmed.set_result(None)
    await machine.until(lambda: standby.health == "HEALTHY")
    return machine.made[number]


async def test_a_warm_process_is_taken_once_and_replaced(machine: Machine, standby: Standby):
    first = await warm(machine, standby, 0)
    assert standby.take(SLOT + 1) is None
    assert standby.take(SLOT) is first and standby.take(SLOT) is None
    second = await warm(machine, standby, 1)
    assert standby.take(SLOT) is second
    assert machine.said == []


async def test_a_process_that_is_taken_while_it_warms_up_is_replaced(
    machine: Machine, standby: Standby
):
    await machine.until(lambda: machine.made)
    assert standby.take(SLOT) is machine.made[0] and standby.take(SLOT) is None
    machine.made[0].warmed.set_result(None)
    second = await warm(machine, standby, 1)
    assert standby.take(SLOT) is second and not machine.made[0].killed


async def test_an_idle_process_that_dies_is_reported_and_replaced(
    machine: Machine, standby: Standby
):
    for number in range(5):  # more than the limit of deaths in a row, because each one was warm
        (await warm(machine, standby, number)).die()
        await machine.until(lambda: standby.health != "HEALTHY")
    assert machine.said == ["lost the standby process: killed by signal 9"] * 5


async def test_lost_ranks_start_before_a_successor(machine: Machine, standby: Standby):
    await warm(machine, standby, 0)
    machine.settled.clear()
    standby.take(SLOT)
    await asyncio.sleep(0.02)
    assert len(machine.made) == 1
    machine.settled.set()
    await warm(machine, standby, 1)


async def test_a_process_that_never_starts_is_given_up_until_one_is_needed(
    machine: Machine, standby: Standby, monkeypatch: pytest.MonkeyPatch
):
    for number in range(2):
        await machine.until(lambda n=number: len(machine.made) > n)
        machine.made[number].warmed.set_exception(InternalError("no memory"))
    await machine.until(lambda: standby.given_up)
    assert machine.said[:2] == ["the standby process did not start: no memory"] * 2
    assert "is given up" in machine.said[2] and all(process.killed for process in machine.made)
    assert standby.take(SLOT) is None and len(machine.made) == 2
    monkeypatch.setattr(backoff, "COOLDOWN_S", 0.0)
    assert standby.take(SLOT) is None
    await warm(machine, standby, 2)
