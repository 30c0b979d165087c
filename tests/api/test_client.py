"""The client of the controller finds the active process."""

import asyncio
from typing import Any

import pytest

from skyrl_actors.api import client
from skyrl_actors.api.client import ControllerClient
from skyrl_actors.controller.calls import ControllerCalls
from skyrl_actors.remote import ActorDied
from skyrl_actors.transport.rpc import Address
from skyrl_actors.transport.rpc_server import RpcServer, to_one

THERE = Address(host="127.0.0.1", port=1, token=b"x")


class Process:
    """An actor whose `get_rpc_address` answers so."""

    def __init__(self, answer: Any):
        self.answer, self.given_up = answer, False

    @property
    def get_rpc_address(self) -> Any:
        return self

    async def remote(self, _: str) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer == "never":
            try:
                await asyncio.Event().wait()
            finally:
                self.given_up = True
        return self.answer


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch):
    async def same(call: Any) -> Any:
        return await call

    monkeypatch.setattr(client, "settled", same)
    monkeypatch.setattr(client, "node_address", lambda: "127.0.0.1")


@pytest.mark.parametrize("others", [ActorDied("it died"), None, "never"])
async def test_the_active_process_is_found_whatever_the_other_one_says(others: Any):
    other = Process(others)
    for processes in ((other, Process(THERE)), (Process(THERE), other)):
        other.given_up = False
        assert await ControllerClient(*processes)._address() == THERE
        assert other.given_up == (others == "never")


async def test_without_an_active_process_the_client_asks_again():
    with pytest.raises(ActorDied, match="no process of the controller answers"):
        await ControllerClient(Process(None), Process(None))._address()
    with pytest.raises(ActorDied, match="it died"):
        await ControllerClient(Process(ActorDied("it died")))._address()


@pytest.mark.parametrize("turns", range(1, 7))
async def test_a_call_that_is_cancelled_as_its_answer_comes_is_cancelled(turns: int):
    answered = asyncio.Event()

    class Answering(ControllerClient):
        async def _ask(self, method: Any, arguments: Any, named: Any) -> Any:
            await answered.wait()

    calling = asyncio.create_task(Answering().once.fault())
    await asyncio.sleep(0.01)
    answered.set()
    for _ in range(turns):
        if calling.done():
            return
        await asyncio.sleep(0)
    if calling.cancel():
        with pytest.raises(asyncio.CancelledError):
            await calling


async def test_a_process_that_stands_still_does_not_end_the_search(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(client, "ANSWER_S", 0.05)
    stopped, waiting = Process("never"), Process(None)
    found = ControllerClient(stopped, waiting)
    with pytest.raises(ActorDied):
        await asyncio.wait_for(found._address(), 5)
    assert stopped.given_up
    waiting.answer = THERE
    assert await found._address() == THERE


async def test_calls_leave_a_process_that_another_one_replaced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client, "FOLLOW_S", 0.01)
    servers = [RpcServer(to_one(Answers(name)), ControllerCalls) for name in ("old", "new")]
    addresses = [await server.address("127.0.0.1") for server in servers]
    old, new = Process(addresses[0]), Process("never")
    found = ControllerClient(old, new)
    waiting = asyncio.create_task(found.calls.fault())
    await asyncio.sleep(0.1)
    assert not waiting.done()
    old.answer, new.answer = "never", addresses[1]
    assert await asyncio.wait_for(waiting, 5) == "new"
    for server in servers:
        server.hang_up()
        await server.close()


class Answers:
    """A controller whose old process does not answer any more."""

    def __init__(self, name: str):
        self.name = name

    async def fault(self) -> str | None:
        if self.name == "old":
            await asyncio.Event().wait()
        return self.name


async def test_processes_that_replaced_all_others_are_found_by_name(
    monkeypatch: pytest.MonkeyPatch,
):
    named = {"svc:controller": Process(THERE)}
    monkeypatch.setattr(client, "actor_names", lambda name: (f"{name}:controller", f"{name}:other"))
    monkeypatch.setattr(client, "named_actor", named.get)
    for processes in ((), (Process(ActorDied("killed")),)):
        found = ControllerClient(*processes, name="svc")
        with pytest.raises(ActorDied):
            await found._address()
        assert await found._address() == THERE
    missing = ControllerClient(name="svc")
    named.clear()
    for _ in range(2):
        with pytest.raises(ActorDied, match="no process of the controller answers"):
            await missing._address()
