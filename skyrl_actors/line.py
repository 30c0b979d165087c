"""A direct line to an actor: Ray finds it and restarts it, a socket carries the calls. A call costs a fraction of a
millisecond, where one through Ray costs two.

Only processes of this service talk here: who connects must first show a token that only the actor itself gives out, through
Ray; nothing is unpickled before.
"""

import asyncio
import hmac
import logging
import pickle
import secrets
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from skyrl_actors.messages.errors import InternalError, SkyrlActorsError
from skyrl_actors.remote import ActorDied, ended, node_address

log = logging.getLogger(__name__)
HEAD_BYTES, TOKEN_BYTES = 8, 32
LONGEST_FRAME = 2**31
HELLO_S = 10.0
READ_AHEAD = 2**20
GIVEN_UP = ""  # in a method's place: who called under this number no longer waits


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int
    token: bytes


def _frame(content: Any) -> bytes:
    body = pickle.dumps(content, protocol=5)
    return len(body).to_bytes(HEAD_BYTES) + body


async def _read(reader: asyncio.StreamReader) -> Any:
    """Raises IncompleteReadError or ConnectionError when the other side is gone."""
    size = int.from_bytes(await reader.readexactly(HEAD_BYTES))
    if size > LONGEST_FRAME:
        raise ConnectionError(f"a frame of {size} bytes")
    return pickle.loads(await reader.readexactly(size))


class LineServer:
    """In the actor: answers calls of `methods` on `target`, many at once, on the loop that started it. Calls of `abandoned` are
    cancelled when their caller gives them up; others are done to their end all the same."""

    def __init__(self, target: Any, methods: Collection[str], abandoned: Collection[str] = ()):
        self._target = target
        self._methods = frozenset(methods)
        self._abandoned = frozenset(abandoned)
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._servers: dict[str, asyncio.Server] = {}
        self._opening = asyncio.Lock()
        self._calls: set[asyncio.Task[Any]] = set()

    async def address(self, host: str) -> Address:
        """Listens there from now on."""
        async with self._opening:
            if host not in self._servers:
                self._servers[host] = await asyncio.start_server(self._serve, host, 0, limit=READ_AHEAD)
        return Address(host, self._servers[host].sockets[0].getsockname()[1], self._token)

    async def address_for(self, caller: str) -> Address:
        """Where a process on that machine calls. The network is listened to only for other machines."""
        own = node_address()
        return await self.address("127.0.0.1" if caller == own else own)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        abandoned: dict[int, asyncio.Task[Any]] = {}  # what ends with its caller's interest
        try:
            shown = await asyncio.wait_for(reader.readexactly(TOKEN_BYTES), HELLO_S)
            while hmac.compare_digest(shown, self._token):
                number, method, arguments = await _read(reader)
                if method == GIVEN_UP:
                    if (given_up := abandoned.get(number)) is not None:
                        given_up.cancel()
                    continue
                call = asyncio.create_task(self._called(method, arguments))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
                call.add_done_callback(partial(self._reply, writer, number, method))
                if method in self._abandoned:
                    abandoned[number] = call
                    call.add_done_callback(lambda _, number=number: abandoned.pop(number))
        except (asyncio.IncompleteReadError, OSError, TimeoutError):
            pass  # the caller is gone
        finally:
            for call in abandoned.values():  # what else it asked for is done to its end, and not half
                call.cancel()
            writer.close()

    async def _called(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if method not in self._methods:
            raise InternalError(f"{method!r} can not be called over the line")
        return await getattr(self._target, method)(*arguments)

    @staticmethod
    def _reply(writer: asyncio.StreamWriter, number: int, method: str, call: asyncio.Task[Any]) -> None:
        error = InternalError(f"{method} was cancelled there") if call.cancelled() else call.exception()
        if error is not None and not isinstance(error, SkyrlActorsError):
            log.error("%s failed", method, exc_info=error)
            error = InternalError(f"{method}: {type(error).__name__}: {error}")
        if writer.is_closing():
            return
        writer.write(_frame((number, error is None, call.result() if error is None else error)))

    async def close(self) -> None:
        for server in self._servers.values():
            server.close()


class Line:
    """At the caller. It is opened by the first call, and anew by the first one after it broke; calls that were under way when it
    breaks raise ActorDied. `find` asks the actor, through Ray, where it is."""

    def __init__(self, find: Callable[[], Awaitable[Address]]):
        self._find = find
        self._opening: asyncio.Task[_Open] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(self, method: str, *arguments: Any) -> Any:
        return await (await self._opened()).call(method, arguments)

    async def _opened(self) -> "_Open":
        loop = asyncio.get_running_loop()
        is_usable = self._opening is not None and self._loop is loop and not _is_broken(self._opening)
        if not is_usable:
            self._loop, self._opening = loop, loop.create_task(_Open.to(self._find))
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
                await opening.result().close()
            await ended(opening)


def _is_broken(opening: "asyncio.Task[_Open]") -> bool:
    if not opening.done():
        return False
    return opening.cancelled() or opening.exception() is not None or opening.result().broken


class _Open:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.broken = False
        self._writer = writer
        self._next = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reading = asyncio.create_task(self._read_all(reader))

    @staticmethod
    async def to(find: Callable[[], Awaitable[Address]]) -> "_Open":
        address = await find()
        try:
            opening = asyncio.open_connection(address.host, address.port, limit=READ_AHEAD)
            reader, writer = await asyncio.wait_for(opening, HELLO_S)
        except (OSError, TimeoutError) as error:
            raise ActorDied(f"no line to the actor: {error}") from None
        writer.write(address.token)
        return _Open(reader, writer)

    async def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if self.broken:
            raise ActorDied("the line to the actor broke")
        self._next += 1
        number = self._next
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._writer.write(_frame((number, method, arguments)))
        try:
            return await answer
        except asyncio.CancelledError:
            if not self.broken:
                self._writer.write(_frame((number, GIVEN_UP, ())))
            raise
        finally:
            self._waiting.pop(number, None)

    async def _read_all(self, reader: asyncio.StreamReader) -> None:
        reason = "it ended"
        try:
            while True:
                number, is_result, content = await _read(reader)
                answer = self._waiting.get(number)
                if answer is None or answer.done():
                    continue  # who asked no longer waits
                if is_result:
                    answer.set_result(content)
                else:
                    answer.set_exception(content)
        except (asyncio.IncompleteReadError, OSError, pickle.UnpicklingError) as error:
            reason = str(error) or reason
        finally:
            self.broken = True
            self._writer.close()
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(ActorDied(f"the line to the actor broke: {reason}"))

    def hang_up(self) -> None:
        self.broken = True
        self._writer.transport.abort()
        self._reading.cancel()

    async def close(self) -> None:
        await ended(self._reading)
