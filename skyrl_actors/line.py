"""A direct line to an actor: Ray finds it and restarts it, a socket carries the calls. A call costs a
fraction of a millisecond, where one through Ray costs two.

Only processes of this service talk here: both sides prove that they know a secret that the actor
gives out through Ray (`handshake`). Before that nothing is unpickled and next to nothing is stored.

What one connection may occupy is bounded. The server reads no more calls while too many of them are
under way, and begins none while the caller does not read its answers. A caller that reads nothing
for `STALLED_S` is cut off. At the caller, calls wait while the connection is full.
"""

import asyncio
import logging
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from skyrl_actors import frames, handshake
from skyrl_actors.frames import Frame, FrameStream
from skyrl_actors.handshake import NONCE_BYTES, PROOF_BYTES, Challenge, RayTls
from skyrl_actors.messages.errors import InternalError, SkyrlActorsError
from skyrl_actors.remote import ActorDied, ended, node_address

log = logging.getLogger(__name__)
HELLO_S = 10.0
STALLED_S = 30.0
MOST_UNKNOWN = 64  # connections that have not shown the secret yet
MOST_CALLS = 2**15  # that a caller awaits on one connection; more wait there
MOST_CALL_BYTES = 2**29  # of their arguments; a single larger call is taken alone
BURST = 4  # calls that are begun before it is seen whether their answers are taken
ACCEPT_PAUSE_S = 0.1
LOOPBACK = "127.0.0.1"
GIVEN_UP = ""  # in a method's place: who called under this number no longer waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    host: str
    port: int
    token: bytes
    tls: bool = False


class LineServer:
    """In the actor: answers calls of `methods` on `target`, many at once, on the loop that started it. Calls of `abandoned` are
    cancelled when their caller gives them up; others are done to their end all the same."""

    def __init__(
        self, target: Any, methods: Collection[str], abandoned: Collection[str] = (), *, stalled_s: float = STALLED_S
    ):  # fmt: skip
        self.abandoned = frozenset(abandoned)
        self.token = handshake.new_nonce()
        self.stalled_s = stalled_s
        self.target = target
        self.methods = frozenset(methods)
        self._listening: dict[str, tuple[socket.socket, RayTls | None]] = {}
        self._accepting: list[asyncio.Task[None]] = []
        self._opening = asyncio.Lock()
        self._unknown: OrderedDict[asyncio.Task[None], None] = OrderedDict()
        self.callers: set[Caller] = set()
        self.calls: set[asyncio.Task[Any]] = set()

    async def address(self, host: str) -> Address:
        """Listens there from now on."""
        async with self._opening:
            if host not in self._listening:
                tls = None if host == LOOPBACK else RayTls.configured()
                listening = socket.create_server((host, 0), backlog=MOST_UNKNOWN)
                listening.setblocking(False)
                self._listening[host] = listening, tls
                self._accepting.append(asyncio.create_task(self._accept(listening, tls)))
        listening, tls = self._listening[host]
        return Address(host=host, port=listening.getsockname()[1], token=self.token, tls=tls is not None)

    async def address_for(self, caller: str) -> Address:
        """Where a process on that machine calls. The network is listened to only for other machines."""
        own = node_address()
        return await self.address(LOOPBACK if caller == own else own)

    async def _accept(self, listening: socket.socket, tls: RayTls | None) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:  # no file descriptor is left, or that caller is gone again
                log.warning("a connection was not accepted: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if len(self._unknown) >= MOST_UNKNOWN:  # a caller of ours shows the secret at once
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
            pass  # it is gone, or does not speak as a caller of ours
        finally:
            if not known:
                stream.abort()
                connection.close()
        if known:
            self.callers.add(caller := Caller(self, stream))
            stream.lost.add_done_callback(lambda _: self.callers.discard(caller))

    async def _is_known(self, stream: FrameStream, tls: RayTls | None) -> bool:
        nonce = await stream.receive()
        if len(nonce) != NONCE_BYTES:
            return False
        challenge = Challenge(nonce, handshake.new_nonce(), tls.digest() if tls else b"")
        stream.send_short(challenge.server_nonce + challenge.proof(self.token, "server"))
        return challenge.is_proven(self.token, "caller", await stream.receive())

    async def close(self) -> None:
        """No new connections; those that are open end with their callers."""
        await ended(*self._accepting, *self._unknown)
        for listening, _ in self._listening.values():
            listening.close()


class Caller:
    """One authenticated connection at the server."""

    def __init__(self, server: LineServer, stream: FrameStream):
        self._server = server
        self._stream = stream
        self._abandoned: dict[int, asyncio.Task[Any]] = {}  # what ends with its caller's interest
        self._under_way = self._bytes = self._burst = 0
        stream.lost.add_done_callback(self._gone)
        stream.serve(self._take, self._read_on)

    def _take(self, body: memoryview, arrays: int) -> None:
        number, method, arguments = frames.decoded(body, arrays)
        if method == GIVEN_UP:
            if (given_up := self._abandoned.get(number)) is not None:
                given_up.cancel()
            return
        loop = asyncio.get_running_loop()
        call = loop.create_task(self._called(method, arguments))
        self._server.calls.add(call)
        self._under_way += 1
        self._bytes += len(body)
        call.add_done_callback(partial(self._done, number, method, len(body)))
        if method in self._server.abandoned:
            self._abandoned[number] = call
        self._burst += 1
        if self._burst == BURST:  # let these calls run, and see whether their answers are taken
            self._burst = 0
            self._stream.hold()
            loop.call_soon(loop.call_soon, self._read_on)  # behind the answers of calls that wait for nothing
        elif self._is_full():
            self._stream.hold()

    def _read_on(self) -> None:
        if not self._is_full():
            self._stream.release()

    async def _called(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if method not in self._server.methods:
            raise InternalError(f"{method!r} can not be called over the line")
        return await getattr(self._server.target, method)(*arguments)

    def _is_full(self) -> bool:
        # Twice what a caller waits for: it must be able to give up calls when all its places are taken.
        too_many = self._under_way >= 2 * MOST_CALLS or self._bytes >= MOST_CALL_BYTES
        return too_many or self._stream.is_behind

    def _done(self, number: int, method: str, size: int, call: asyncio.Task[Any]) -> None:
        self._server.calls.discard(call)
        self._abandoned.pop(number, None)
        error = InternalError(f"{method} was cancelled there") if call.cancelled() else call.exception()
        if error is not None and not isinstance(error, SkyrlActorsError):
            log.error("%s failed", method, exc_info=error)
            error = InternalError(f"{method}: {type(error).__name__}: {error}")
        reply = (number, False, error) if error is not None else (number, True, call.result())
        sending = self._stream.send(partial(_encoded_reply, method, reply))
        if sending is None:
            self._answered(size)
        else:
            sending.add_done_callback(lambda _: self._answered(size))

    def _answered(self, size: int) -> None:
        self._under_way -= 1
        self._bytes -= size
        self._read_on()

    def _gone(self, _: object) -> None:
        """What else it asked for is done to its end, and not half."""
        for call in self._abandoned.values():
            call.cancel()


def _encoded_reply(method: str, reply: tuple[int, bool, Any]) -> Frame:
    try:
        return frames.encoded(reply)
    except frames.NOT_ENCODED as error:
        log.error("the answer of %s can not be sent", method, exc_info=error)
        return frames.encoded((reply[0], False, InternalError(f"the answer of {method} can not be sent: {error}")))


class Line:
    """At the caller. It is opened by the first call, and anew by the first one after it broke; calls that were under way when it
    breaks raise ActorDied. `find` asks the actor, through Ray, where it is."""

    def __init__(self, find: Callable[[], Awaitable[Address]]):
        self._find = find
        self._opening: asyncio.Task[Connection] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(self, method: str, *arguments: Any) -> Any:
        return await (await self.opened()).call(method, arguments)

    async def opened(self) -> "Connection":
        loop = asyncio.get_running_loop()
        is_usable = self._opening is not None and self._loop is loop and not _is_broken(self._opening)
        if not is_usable:
            self._loop, self._opening = loop, loop.create_task(Connection.to(self._find))
        assert self._opening is not None
        return await asyncio.shield(self._opening)

    def hang_up(self) -> None:
        """The actor is known to be gone, also if its machine says nothing: calls that are under way raise ActorDied."""
        if self._opening is not None and self._opening.done() and not _is_broken(self._opening):
            self._opening.result().hang_up()

    async def close(self) -> None:
        if self._opening is not None and self._loop is asyncio.get_running_loop():
            opening, self._opening = self._opening, None
            if opening.done() and not opening.cancelled() and opening.exception() is None:
                opening.result().hang_up()
            await ended(opening)


def _is_broken(opening: "asyncio.Task[Connection]") -> bool:
    if not opening.done():
        return False
    return opening.cancelled() or opening.exception() is not None or opening.result().broken


class Connection:
    """An open line at the caller."""

    def __init__(self, stream: FrameStream):
        self.broken = False
        self.stream = stream
        self._next = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._places = asyncio.Semaphore(MOST_CALLS)
        stream.lost.add_done_callback(self._lost)
        stream.serve(self._take)

    @staticmethod
    async def to(find: Callable[[], Awaitable[Address]]) -> "Connection":
        """Raises ActorDied when the actor is not there, or something else is there in its place."""
        address = await find()
        tls = RayTls.configured() if address.tls else None
        if address.tls and tls is None:
            raise InternalError("the actor's line is encrypted by Ray's certificates; set RAY_USE_TLS for this process too")
        stream, proven = FrameStream(), False
        try:
            async with asyncio.timeout(HELLO_S):
                await asyncio.get_running_loop().create_connection(
                    lambda: stream, address.host, address.port, ssl=tls.context("caller") if tls else None
                )
                proven = await _is_actor(stream, address.token)
        except (OSError, TimeoutError) as error:
            raise ActorDied(f"no line to the actor: {error}") from None
        finally:
            if not proven:
                stream.abort()
        if not proven:
            raise ActorDied(f"no line to the actor: what answers at {address.host}:{address.port} does not know its secret")
        return Connection(stream)

    async def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        await self._places.acquire()
        self._next += 1
        number = self._next
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        sending: asyncio.Future[None] | None = None
        try:
            if self.broken:
                raise ActorDied("the line to the actor broke")
            sending = self.stream.send(lambda: frames.encoded((number, method, arguments)))
            if sending is not None:
                await asyncio.shield(sending)
            return await answer
        except asyncio.CancelledError:
            if not self.broken:
                sending = self.stream.send(lambda: frames.encoded((number, GIVEN_UP, ())))
            raise
        finally:
            self._waiting.pop(number, None)
            if sending is None or sending.done():
                self._places.release()
            else:  # what is not sent yet counts
                sending.add_done_callback(lambda _: self._places.release())

    def _take(self, body: memoryview, arrays: int) -> None:
        number, is_result, content = frames.decoded(body, arrays)
        answer = self._waiting.get(number)
        if answer is None or answer.done():
            return  # who asked no longer waits
        if is_result:
            answer.set_result(content)
        else:
            answer.set_exception(content)

    def _lost(self, _: object) -> None:
        self.broken = True
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ActorDied("the line to the actor broke: it ended"))

    def hang_up(self) -> None:
        self.broken = True
        self.stream.abort()


async def _is_actor(stream: FrameStream, secret: bytes) -> bool:
    """Whether the other side knows the secret; then this side proves that it does too."""
    nonce = handshake.new_nonce()
    stream.send_short(nonce)
    answer = await stream.receive()
    if len(answer) != NONCE_BYTES + PROOF_BYTES:
        return False
    certificate = handshake.digest_of_peer(stream.transport.get_extra_info("ssl_object"))
    challenge = Challenge(nonce, answer[:NONCE_BYTES], certificate)
    if not challenge.is_proven(secret, "server", answer[NONCE_BYTES:]):
        return False
    stream.send_short(challenge.proof(secret, "caller"))
    return True
