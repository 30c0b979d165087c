"""Call methods of an actor over a socket. Ray finds and restarts the actor.

A Protocol lists the methods that an actor serves. Clients pass a method of that Protocol, so a type
checker knows its arguments and its result. A message has the method's name, and only types that the
Protocol names (`encoding`).

A call costs a fraction of a millisecond; a call through Ray costs two milliseconds.

Only processes of this service can connect. Both sides prove that they know a secret, which the
actor hands out through Ray (`handshake`). Before that nothing is decoded and almost nothing is
stored.

Calls wait while the connection is full. `rpc_server` is the other side.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from skyrl_actors.messages.errors import InternalError
from skyrl_actors.remote import ActorDied, ended
from skyrl_actors.transport import handshake
from skyrl_actors.transport.encoding import CallEncoding
from skyrl_actors.transport.frames import FrameStream
from skyrl_actors.transport.handshake import NONCE_BYTES, PROOF_BYTES, Challenge, RayTls
from skyrl_actors.transport.protocols import Deferred

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
HELLO_S = 10.0
MOST_CALLS = 2**15  # unanswered calls of one connection; more wait in the client
GIVEN_UP = ""  # in place of a method: the client gave up the call of this number


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where an actor's RPC server listens, and its secret."""

    host: str
    port: int
    token: bytes
    tls: bool = False


class RpcClient:
    """The client of an actor's RPC server.

    The first call connects, and so does the first call after a lost connection. Calls that run when
    the connection is lost raise ActorDied. `find` requests the actor's address through Ray.
    `protocol` is the one that the actor serves.
    """

    def __init__(self, find: Callable[[], Awaitable[Address]], protocol: type):
        self._find = find
        self._address: Address | None = None  # of the connection
        self._encoding = CallEncoding(protocol)
        self._opening: asyncio.Task[Connection] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @overload
    async def call(
        self,
        method: Callable[Concatenate[Any, P], Awaitable[Deferred[R]]],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> R: ...

    @overload
    async def call(
        self,
        method: Callable[Concatenate[Any, P], Awaitable[R]],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> R: ...

    async def call(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a method of the actor's Protocol and return its result.

        Raises its error, or ActorDied.
        """
        return await (await self.opened()).call(method.__name__, arguments, named)

    async def opened(self) -> "Connection":
        """Return the open connection; connect if there is none."""
        loop = asyncio.get_running_loop()
        is_usable = (
            self._opening is not None and self._loop is loop and not _is_broken(self._opening)
        )
        if not is_usable:
            self._loop, self._opening = loop, loop.create_task(self._connected())
        assert self._opening is not None
        return await asyncio.shield(self._opening)

    async def _connected(self) -> "Connection":
        self._address = await self._find()
        return Connection(await _stream_to(self._address), self._encoding)

    def hang_up(self) -> None:
        """Fail all running calls with ActorDied: the actor is known to be gone.

        This also covers a machine that vanished without closing its connections.
        """
        if self._opening is not None and self._opening.done() and not _is_broken(self._opening):
            self._opening.result().hang_up()

    def leave_unless(self, address: Address) -> None:
        """Fail all running calls with ActorDied if they are made at another address."""
        if self._address != address:
            self.hang_up()

    async def close(self) -> None:
        """Close the connection. Running calls raise ActorDied."""
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
    """One open connection of a client."""

    def __init__(self, stream: FrameStream, encoding: CallEncoding):
        self.broken = False
        self.stream = stream
        self._encoding = encoding
        self._next = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._places = asyncio.Semaphore(MOST_CALLS)
        stream.lost.add_done_callback(self._lost)
        stream.serve(self._take)

    async def call(self, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call a method. If the calling task is cancelled, the server is notified."""
        await self._places.acquire()
        self._next += 1
        number = self._next
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        sending: asyncio.Future[None] | None = None
        try:
            if self.broken:
                raise ActorDied("the connection to the actor was lost")
            sending = self.stream.send(
                lambda: self._encoding.call(number, method, arguments, named)
            )
            if sending is not None:
                await asyncio.shield(sending)
            return await answer
        except asyncio.CancelledError:
            if not self.broken:
                sending = self.stream.send(lambda: self._encoding.call(number, GIVEN_UP, (), {}))
            raise
        finally:
            self._waiting.pop(number, None)
            if sending is None or sending.done():
                self._places.release()
            else:  # an unsent call still counts
                sending.add_done_callback(lambda _: self._places.release())

    def _take(self, body: memoryview, arrays: int) -> None:
        number, is_result, content = self._encoding.decoded_answer(body, arrays)
        answer = self._waiting.get(number)
        if answer is None or answer.done():
            return  # the caller gave up
        if is_result:
            answer.set_result(content)
        else:
            answer.set_exception(content)

    def _lost(self, _: object) -> None:
        self.broken = True
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ActorDied("the connection to the actor was lost"))

    def hang_up(self) -> None:
        """Close the connection. Running calls raise ActorDied."""
        self.broken = True
        self.stream.abort()


async def _stream_to(address: Address) -> FrameStream:
    """Connect and authenticate. Raises ActorDied when the actor is not there."""
    tls = RayTls.configured() if address.tls else None
    if address.tls and tls is None:
        raise InternalError(
            "the actor's connections are encrypted by Ray's certificates: "
            "set RAY_USE_TLS for this process too"
        )
    stream, proven = FrameStream(), False
    try:
        async with asyncio.timeout(HELLO_S):
            await asyncio.get_running_loop().create_connection(
                lambda: stream,
                address.host,
                address.port,
                ssl=tls.context("caller") if tls else None,
            )
            proven = await _is_actor(stream, address.token)
    except (OSError, TimeoutError) as error:
        raise ActorDied(f"no connection to the actor: {error}") from None
    finally:
        if not proven:
            stream.abort()
    if not proven:
        raise ActorDied(
            "no connection to the actor: "
            f"the process at {address.host}:{address.port} does not know its secret"
        )
    return stream


async def _is_actor(stream: FrameStream, secret: bytes) -> bool:
    """Return whether the other side knows the secret; if so, prove to know it too.

    Raises InternalError when it has another version of the protocol.
    """
    nonce = handshake.new_nonce()
    stream.send_short(handshake.own_version() + nonce)
    answer = await stream.receive()
    handshake.check_not_refused(answer)
    if len(answer) != NONCE_BYTES + PROOF_BYTES:
        return False
    certificate = handshake.digest_of_peer(stream.transport.get_extra_info("ssl_object"))
    challenge = Challenge(nonce, answer[:NONCE_BYTES], certificate)
    if not challenge.is_proven(secret, "server", answer[NONCE_BYTES:]):
        return False
    stream.send_short(challenge.proof(secret, "caller"))
    return True
