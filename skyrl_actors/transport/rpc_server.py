"""Serve the methods of an actor over sockets, with bounded resources for each connection.

The resources of one connection are bounded. The server stops reading while too many calls are
running. It starts no call while the client does not read its answers. A client that reads nothing
for `STALLED_S` is disconnected. In the client, calls wait while the connection is full. The large
answers of all connections together are bounded too: such an answer is loaded only when it is sent
(`Deferred`).
"""

import asyncio
import logging
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Any, cast

from skyrl_actors.messages.errors import InternalError
from skyrl_actors.remote import ended, node_address
from skyrl_actors.transport import handshake
from skyrl_actors.transport.byte_budget import ByteBudget, Lease
from skyrl_actors.transport.encoding import CallEncoding
from skyrl_actors.transport.frames import Frame, FrameStream
from skyrl_actors.transport.handshake import Challenge, RayTls
from skyrl_actors.transport.protocols import Deferred, methods_of
from skyrl_actors.transport.rpc import GIVEN_UP, HELLO_S, MOST_CALLS, Address

log = logging.getLogger(__name__)
STALLED_S = 30.0
MOST_UNKNOWN = 64  # connections that are not authenticated yet
MOST_CALL_BYTES = 2**29  # of the arguments of running calls; one larger call runs alone
BURST = 4  # calls to start before checking whether their answers are read
ACCEPT_PAUSE_S = 0.1
REFUSED_S = 1.0  # for a client of another version to read that it is refused
UNSENT_BYTES = 2**28  # of large answers over all connections
SMALL_BYTES = 2**16  # answers up to this size are not counted
LOOPBACK = "127.0.0.1"
Route = Callable[[str], Awaitable[object]]


def to_one(target: object) -> Route:
    """Return the route of a protocol whose methods are all served by one object."""

    async def route(_: str) -> object:
        return target

    return route


class RpcServer:
    """Serve the methods of `protocol`, concurrently, on the loop that started them.

    `route` returns the object whose method of that name is called, and may wait for it.

    Calls of methods in `abandoned` are cancelled when their client gives them up. All other calls
    run to their end.
    """

    def __init__(
        self,
        route: Route,
        protocol: type,
        abandoned: Collection[Callable[..., Any]] = (),
        *,
        stalled_s: float = STALLED_S,
        unsent_bytes: int = UNSENT_BYTES,
    ):
        self.unsent = ByteBudget(unsent_bytes, SMALL_BYTES)
        self.abandoned = frozenset(method.__name__ for method in abandoned)
        self.token = handshake.new_token()
        self.stalled_s = stalled_s
        self.route = route
        self.methods = methods_of(protocol)
        self.encoding = CallEncoding(protocol)
        self._listening: dict[str, tuple[socket.socket, RayTls | None]] = {}
        self._accepting: list[asyncio.Task[None]] = []
        self._opening = asyncio.Lock()
        self._unknown: OrderedDict[asyncio.Task[None], None] = OrderedDict()
        self.callers: set[Caller] = set()
        self.calls: set[asyncio.Task[Any]] = set()

    async def address(self, host: str) -> Address:
        """Listen on this host from now on, and return the address."""
        async with self._opening:
            if host not in self._listening:
                tls = None if host == LOOPBACK else RayTls.configured()
                listening = socket.create_server((host, 0), backlog=MOST_UNKNOWN)
                listening.setblocking(False)
                self._listening[host] = listening, tls
                self._accepting.append(asyncio.create_task(self._accept(listening, tls)))
        listening, tls = self._listening[host]
        return Address(
            host=host, port=listening.getsockname()[1], token=self.token, tls=tls is not None
        )

    async def address_for(self, caller: str) -> Address:
        """Return the address for clients on that machine.

        The server listens on the network only for other machines.
        """
        own = node_address()
        return await self.address(LOOPBACK if caller == own else own)

    async def _accept(self, listening: socket.socket, tls: RayTls | None) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:  # no file descriptor is left, or the client is gone again
                log.warning("a connection was not accepted: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if len(self._unknown) >= MOST_UNKNOWN:  # a real client authenticates at once
                oldest, _ = self._unknown.popitem(last=False)
                oldest.cancel()
            admitting = loop.create_task(self._admit(connection, tls))
            self._unknown[admitting] = None
            admitting.add_done_callback(lambda task: self._unknown.pop(task, None))

    async def _admit(self, connection: socket.socket, tls: RayTls | None) -> None:
        stream, known = FrameStream(self.stalled_s), False
        try:
            async with asyncio.timeout(HELLO_S):
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: stream, connection, ssl=tls.context("server") if tls else None
                )
                known = await self._is_known(stream, tls)
        except (OSError, TimeoutError):
            pass  # the connection is gone, or is not a client of this service
        finally:
            if not known:
                stream.abort()
                connection.close()
        if known:
            self.callers.add(caller := Caller(self, stream))
            stream.lost.add_done_callback(lambda _: self.callers.discard(caller))

    async def _is_known(self, stream: FrameStream, tls: RayTls | None) -> bool:
        nonce = handshake.nonce_in(await stream.receive())
        if nonce is None:
            stream.send_short(handshake.own_version())
            await asyncio.wait((stream.lost,), timeout=REFUSED_S)
            return False
        challenge = Challenge(nonce, handshake.new_nonce(), tls.digest() if tls else b"")
        stream.send_short(challenge.server_nonce + challenge.proof(self.token, "server"))
        return challenge.is_proven(self.token, "caller", await stream.receive())

    def hang_up(self) -> None:
        """Close all connections, so that their clients look for the actor again."""
        for caller in list(self.callers):
            caller.hang_up()

    async def close(self) -> None:
        """Accept no new connections. Open ones end with their clients."""
        await ended(*self._accepting, *self._unknown)
        for listening, _ in self._listening.values():
            listening.close()


class Caller:
    """One authenticated connection at the server."""

    def __init__(self, server: RpcServer, stream: FrameStream):
        self._server = server
        self._stream = stream
        self._abandoned: dict[int, asyncio.Task[Any]] = {}  # to cancel when given up
        self._under_way = self._bytes = self._burst = 0
        stream.lost.add_done_callback(self._gone)
        stream.serve(self._take, self._read_on)

    def hang_up(self) -> None:
        self._stream.abort()

    def _take(self, body: memoryview, arrays: int) -> None:
        number, method, arguments, named = self._server.encoding.decoded_call(body, arrays)
        if method == GIVEN_UP:
            if (given_up := self._abandoned.get(number)) is not None:
                given_up.cancel()
            return
        loop = asyncio.get_running_loop()
        call = loop.create_task(self._called(method, arguments, named))
        self._server.calls.add(call)
        self._under_way += 1
        self._bytes += len(body)
        call.add_done_callback(partial(self._done, number, method, len(body)))
        if method in self._server.abandoned:
            self._abandoned[number] = call
        self._burst += 1
        if self._burst == BURST:  # let these calls run, then check if their answers are read
            self._burst = 0
            self._stream.hold()
            # Twice: resume after the answers of calls that do not wait.
            loop.call_soon(loop.call_soon, self._read_on)
        elif self._is_full():
            self._stream.hold()

    def _read_on(self) -> None:
        if not self._is_full():
            self._stream.release()

    async def _called(self, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if method not in self._server.methods:
            raise InternalError(f"{method!r} cannot be called over RPC")
        target = await self._server.route(method)
        return await getattr(target, method)(*arguments, **named)

    def _is_full(self) -> bool:
        # Twice a client's limit: it must be able to give up calls when all of them are in use.
        too_many = self._under_way >= 2 * MOST_CALLS or self._bytes >= MOST_CALL_BYTES
        return too_many or self._stream.is_behind

    def _done(self, number: int, method: str, size: int, call: asyncio.Task[Any]) -> None:
        self._server.calls.discard(call)
        self._abandoned.pop(number, None)
        error = (
            InternalError(f"{method} was cancelled in the actor")
            if call.cancelled()
            else call.exception()
        )
        encoding = self._server.encoding
        if error is not None:
            sending = self._stream.send(partial(encoding.error, number, method, error))
        elif isinstance(answer := call.result(), Deferred):
            deferred = cast(Deferred[Any], answer)
            unsent = Unsent(self._server, number, method, deferred)
            sending = self._stream.send(unsent.encoded)
            if sending is not None:
                sending.add_done_callback(unsent.sent)
        else:
            sending = self._stream.send(partial(encoding.answer, number, method, answer))
        if sending is None:
            self._answered(size)
        else:
            sending.add_done_callback(lambda _: self._answered(size))

    def _answered(self, size: int) -> None:
        self._under_way -= 1
        self._bytes -= size
        self._read_on()

    def _gone(self, _: object) -> None:
        """Cancel the calls that may be abandoned. The others run to their end."""
        for call in self._abandoned.values():
            call.cancel()


class Unsent:
    """A large answer in the send queue. It takes its bytes of the budget before it is loaded."""

    def __init__(self, server: RpcServer, number: int, method: str, answer: Deferred[Any]):
        self._server = server
        self._number = number
        self._method = method
        self._answer = answer
        self._lease: Lease | None = None

    async def encoded(self) -> Frame:
        """Load the answer and encode it."""
        self._lease = await self._server.unsent.take("", self._answer.num_bytes)
        (found,) = await asyncio.gather(self._answer.load(), return_exceptions=True)
        if isinstance(found, BaseException):
            return self._server.encoding.error(self._number, self._method, found)
        return self._server.encoding.answer(self._number, self._method, found)

    def sent(self, _: object) -> None:
        if self._lease is not None:
            self._lease.release()
