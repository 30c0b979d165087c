"""A direct line: many calls at once, errors as they were raised, tokens, and what breaks."""

import asyncio
import gc
from typing import Any

import numpy as np
import pytest

from skyrl_actors.line import Address, Line, LineServer
from skyrl_actors.messages.errors import InternalError, NotFound
from skyrl_actors.remote import ActorDied


class Target:
    def __init__(self) -> None:
        self.waits, self.done = asyncio.Event(), asyncio.Event()
        self.hold, self.ended = asyncio.Event(), asyncio.Event()
        self.cancelled = 0

    async def add(self, a: int, b: int) -> int:
        await asyncio.sleep(0.01 * (a % 3))
        return a + b

    async def echo(self, value: Any) -> Any:
        return value

    async def refuse(self) -> None:
        raise NotFound("nobody is here")

    async def break_(self) -> None:
        raise ZeroDivisionError("ours")

    async def wait(self) -> None:
        self.waits.set()
        await self.hold.wait()
        self.done.set()

    async def sample(self) -> None:
        try:
            await self.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.ended.set()

    async def secret(self) -> str:
        return "not to be called"


class Served:
    def __init__(self) -> None:
        self.target = Target()
        self.server = LineServer(self.target, ("add", "echo", "refuse", "break_", "wait", "sample"), abandoned=("sample",))
        self.found = 0

    async def find(self) -> Address:
        self.found += 1
        return await self.server.address("127.0.0.1")


@pytest.fixture
async def served():
    made = Served()
    yield made
    await made.server.close()


async def test_many_calls_at_once_over_one_connection(served: Served):
    line = Line(served.find)
    assert await asyncio.gather(*(line.call("add", i, 1) for i in range(500))) == list(range(1, 501))
    big = np.arange(3_000_000, dtype=np.float32)
    assert np.array_equal(await line.call("echo", big), big)
    assert served.found == 1
    await line.close()


async def test_errors_come_as_they_were_raised(served: Served):
    line = Line(served.find)
    with pytest.raises(NotFound, match="nobody is here"):
        await line.call("refuse")
    with pytest.raises(InternalError, match="break_: ZeroDivisionError: ours"):
        await line.call("break_")
    for method in ("secret", "__class__", "nothing"):
        with pytest.raises(InternalError, match="can not be called over the line"):
            await line.call(method)
    await line.close()


async def test_a_line_that_breaks_ends_its_calls_and_is_opened_again(served: Served):
    line = Line(served.find)
    assert await line.call("add", 1, 2) == 3
    waiting = asyncio.create_task(line.call("wait"))
    await asyncio.wait_for(served.target.waits.wait(), 10)
    (await line.opened()).stream.abort()
    with pytest.raises(ActorDied, match="the line to the actor broke"):
        await waiting
    assert await line.call("add", 1, 2) == 3 and served.found == 2
    await line.close()
    served.target.hold.set()
    await asyncio.wait_for(served.target.done.wait(), 10)  # what was begun is not left half done


async def test_nobody_is_there(served: Served):
    address = await served.find()
    await served.server.close()

    async def find() -> Address:
        return Address(host="127.0.0.1", port=address.port, token=address.token)

    with pytest.raises(ActorDied, match="no line to the actor"):
        await Line(find).call("add", 1, 2)


async def test_without_the_token_nothing_is_read(served: Served):
    address = await served.find()
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(b"x" * 32 + (8).to_bytes(8) + b"bad pickle")
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()

    async def find() -> Address:
        return Address(host=address.host, port=address.port, token=b"y" * 32)

    with pytest.raises(ActorDied):
        await Line(find).call("add", 1, 2)
    gc.collect()


async def test_a_call_that_is_given_up_leaves_the_line_whole(served: Served):
    line = Line(served.find)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(line.call("wait"), 0.05)
    served.target.hold.set()
    assert await line.call("add", 2, 2) == 4
    await line.close()


@pytest.mark.parametrize("how", ["given up", "line broken", "not given up"])
async def test_what_nobody_waits_for_is_cancelled_where_it_runs(served: Served, how: str):
    """Of the methods of which this is wanted."""
    line = Line(served.find)
    call = asyncio.create_task(line.call("sample"))
    other = asyncio.create_task(line.call("wait"))
    await asyncio.wait_for(served.target.waits.wait(), 10)
    if how == "given up":
        call.cancel()
    elif how == "line broken":
        (await line.opened()).stream.abort()
    else:
        served.target.hold.set()
    await asyncio.wait_for(served.target.ended.wait(), 10)
    assert served.target.cancelled == (how != "not given up")
    served.target.hold.set()
    await asyncio.wait_for(served.target.done.wait(), 10)
    await asyncio.gather(call, other, return_exceptions=True)
    await line.close()


async def test_a_line_to_an_actor_that_is_known_to_be_gone(served: Served):
    """Its machine may have said nothing."""
    line = Line(served.find)
    line.hang_up()
    call = asyncio.create_task(line.call("wait"))
    await asyncio.wait_for(served.target.waits.wait(), 10)
    line.hang_up()
    with pytest.raises(ActorDied):
        await asyncio.wait_for(call, 10)
    assert await line.call("add", 1, 2) == 3 and served.found == 2
    await line.close()
    served.target.hold.set()


async def test_who_still_waits_hears_that_it_was_cancelled(served: Served):
    line = Line(served.find)
    call = asyncio.create_task(line.call("wait"))
    await asyncio.wait_for(served.target.waits.wait(), 10)
    for running in served.server.calls:
        running.cancel()
    with pytest.raises(InternalError, match="wait was cancelled there"):
        await asyncio.wait_for(call, 10)
    await line.close()
