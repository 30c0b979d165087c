"""RPC over one connection: concurrent calls, errors, authentication and lost connections."""

import asyncio
import gc
from typing import Any

import numpy as np
import pytest

from skyrl_actors.messages.errors import InternalError, InvalidRequest, NotFound
from skyrl_actors.remote import ActorDied
from skyrl_actors.transport import handshake
from skyrl_actors.transport.frames import HEAD
from skyrl_actors.transport.handshake import PROTOCOL_VERSION
from skyrl_actors.transport.rpc import Address, RpcClient
from skyrl_actors.transport.rpc_server import RpcServer, to_one


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

    async def unsendable(self) -> Any:
        return self.hold

    async def sample(self) -> None:
        try:
            await self.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.ended.set()


class Wider(Target):
    async def secret(self) -> str:
        return "not to be called"


class Served:
    def __init__(self) -> None:
        self.target = Wider()
        self.server = RpcServer(to_one(self.target), Target, abandoned=(Target.sample,))
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
    client = RpcClient(served.find, Target)
    assert await asyncio.gather(*(client.call(Target.add, i, 1) for i in range(500))) == list(
        range(1, 501)
    )
    big = np.arange(3_000_000, dtype=np.float32)
    assert np.array_equal(await client.call(Target.echo, big), big)
    assert served.found == 1
    await client.close()


async def test_errors_arrive_as_they_were_raised(served: Served):
    client = RpcClient(served.find, Target)
    with pytest.raises(NotFound, match="nobody is here"):
        await client.call(Target.refuse)
    with pytest.raises(InternalError, match="break_: ZeroDivisionError: ours"):
        await client.call(Target.break_)
    with pytest.raises(InternalError, match="cannot be called over RPC"):
        await client.call(Wider.secret)
    connection = await client.opened()
    for name in ("secret", "__class__", "nothing"):
        with pytest.raises(InternalError, match="cannot be called over RPC"):
            await connection.call(name, (), {})
    await client.close()


async def test_a_lost_connection_fails_its_calls_and_is_reopened(served: Served):
    client = RpcClient(served.find, Target)
    assert await client.call(Target.add, 1, 2) == 3
    waiting = asyncio.create_task(client.call(Target.wait))
    await asyncio.wait_for(served.target.waits.wait(), 10)
    (await client.opened()).stream.abort()
    with pytest.raises(ActorDied, match="the connection to the actor was lost"):
        await waiting
    assert await client.call(Target.add, 1, 2) == 3 and served.found == 2
    await client.close()
    served.target.hold.set()
    await asyncio.wait_for(served.target.done.wait(), 10)  # a started call runs to its end


async def test_a_call_to_a_closed_server_raises_actor_died(served: Served):
    address = await served.find()
    await served.server.close()

    async def find() -> Address:
        return Address(host="127.0.0.1", port=address.port, token=address.token)

    with pytest.raises(ActorDied, match="no connection to the actor"):
        await RpcClient(find, Target).call(Target.add, 1, 2)


async def test_a_value_that_cannot_be_sent_is_refused_and_the_connection_stays(served: Served):
    client = RpcClient(served.find, Target)
    with pytest.raises(InternalError, match=r"echo cannot be called: .*builtins.set cannot be enc"):
        await client.call(Target.echo, {1, 2})
    with pytest.raises(InvalidRequest, match=r"echo: a value cannot be sent: .*at most 64 bits"):
        await client.call(Target.echo, 2**70)
    with pytest.raises(InternalError, match=r"the answer of unsendable cannot be sent: .*Event"):
        await client.call(Target.unsendable)
    assert await client.call(Target.echo, 1) == 1 and served.found == 1
    await client.close()


async def test_a_client_of_another_version_is_refused_with_both_versions(
    served: Served,
):
    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(HEAD.size + handshake.VERSION_BYTES + handshake.NONCE_BYTES)
        writer.write(HEAD.pack(2, 0) + (999).to_bytes(2))
        writer.close()

    listening = await asyncio.start_server(listen, "127.0.0.1", 0)

    async def find() -> Address:
        port = listening.sockets[0].getsockname()[1]
        return Address(host="127.0.0.1", port=port, token=bytes(32))

    with pytest.raises(
        InternalError,
        match=rf"the actor has version 999 .* this process has version {PROTOCOL_VERSION}: install",
    ):
        await RpcClient(find, Target).call(Target.add, 1, 2)
    listening.close()


@pytest.mark.parametrize("hello", [(999).to_bytes(2) + bytes(32), bytes(32), (999).to_bytes(2)])
async def test_a_server_answers_another_version_with_its_own_only(served: Served, hello: bytes):
    address = await served.find()
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(HEAD.pack(len(hello), 0) + hello)
    answer = await asyncio.wait_for(reader.read(), 10)
    assert answer == HEAD.pack(2, 0) + PROTOCOL_VERSION.to_bytes(2)
    assert not served.server.callers
    writer.close()


async def test_a_connection_without_the_token_is_closed(served: Served):
    address = await served.find()
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(b"x" * 32 + (8).to_bytes(8) + b"bad bytes")
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()

    async def find() -> Address:
        return Address(host=address.host, port=address.port, token=b"y" * 32)

    with pytest.raises(ActorDied):
        await RpcClient(find, Target).call(Target.add, 1, 2)
    gc.collect()


async def test_an_abandoned_call_does_not_break_the_connection(served: Served):
    client = RpcClient(served.find, Target)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.call(Target.wait), 0.05)
    served.target.hold.set()
    assert await client.call(Target.add, 2, 2) == 4
    await client.close()


@pytest.mark.parametrize("how", ["given up", "connection lost", "not given up"])
async def test_an_abandoned_call_is_cancelled_in_the_actor(served: Served, how: str):
    """Only calls of the `abandoned` methods are cancelled."""
    client = RpcClient(served.find, Target)
    call = asyncio.create_task(client.call(Target.sample))
    other = asyncio.create_task(client.call(Target.wait))
    await asyncio.wait_for(served.target.waits.wait(), 10)
    if how == "given up":
        call.cancel()
    elif how == "connection lost":
        (await client.opened()).stream.abort()
    else:
        served.target.hold.set()
    await asyncio.wait_for(served.target.ended.wait(), 10)
    assert served.target.cancelled == (how != "not given up")
    served.target.hold.set()
    await asyncio.wait_for(served.target.done.wait(), 10)
    await asyncio.gather(call, other, return_exceptions=True)
    await client.close()


async def test_hang_up_fails_running_calls(served: Served):
    """Its machine may not have closed the connection."""
    client = RpcClient(served.find, Target)
    client.hang_up()
    call = asyncio.create_task(client.call(Target.wait))
    await asyncio.wait_for(served.target.waits.wait(), 10)
    client.hang_up()
    with pytest.raises(ActorDied):
        await asyncio.wait_for(call, 10)
    assert await client.call(Target.add, 1, 2) == 3 and served.found == 2
    await client.close()
    served.target.hold.set()


async def test_a_call_cancelled_in_the_actor_raises_for_its_client(served: Served):
    client = RpcClient(served.find, Target)
    call = asyncio.create_task(client.call(Target.wait))
    await asyncio.wait_for(served.target.waits.wait(), 10)
    for running in served.server.calls:
        running.cancel()
    with pytest.raises(InternalError, match="wait was cancelled in the actor"):
        await asyncio.wait_for(call, 10)
    await client.close()
