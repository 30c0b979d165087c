"""Call the controllers of a service that has several.

Each call goes to the shard that its id names (`shard_rules`). Only a new session has no shard yet.
"""

import asyncio
import itertools
import random
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypeVar

from skyrl_actors.api.client import ControllerClient, Limits
from skyrl_actors.api.shard_rules import Target, target_id, target_of
from skyrl_actors.api.shard_status import with_silent
from skyrl_actors.api.shared_settings import Sharing
from skyrl_actors.api.silent_shards import SilentShards
from skyrl_actors.controller.calls import ControllerCalls
from skyrl_actors.controller.tenants import Sampler
from skyrl_actors.messages.catalog import SessionLabels
from skyrl_actors.messages.errors import NotFound, SkyrlActorsError, Unavailable, UserError
from skyrl_actors.messages.paths import owner_of, shard_mark, shard_of
from skyrl_actors.messages.requests import Request
from skyrl_actors.remote import ended

T = TypeVar("T")
SILENT_S = 10.0  # how long a request waits for its shard, if that does not answer
NEXT_S = 5.0  # how long one of several shards may take for a new session or sampler
OWNER_BASE = 16  # owners are hexadecimal numbers


class ShardedClient(ControllerClient):
    """A client of all shards. `shards` are in the order of their numbers.

    `shares`: it also keeps the keys, limits and mode of all shards equal.
    """

    def __init__(
        self,
        shards: Sequence[ControllerClient],
        spread: Literal["session", "key"] = "session",
        shares: bool = False,
        has_keys: bool = False,
    ):
        super().__init__()
        self._shards = shards
        self._spread = spread
        self._has_keys = has_keys  # in the config, so nobody is let in without one
        self._numbers = range(1, len(shards) + 1)
        self._health = SilentShards(shards)
        self._sharing = Sharing(shards, self._health) if shares else None
        # Ingress processes begin with different shards.
        self._turns = itertools.count(random.randrange(len(shards)))

    async def close(self) -> None:
        """Stop asking the shards whether they answer, and sharing settings."""
        await self._health.close()
        if self._sharing is not None:
            await self._sharing.close()

    async def call(
        self, limits: Limits, method: Callable[..., Any], *arguments: Any, **named: Any
    ) -> Any:
        self._used()
        if method is ControllerCalls.fault:
            return await self._fault(limits)
        target = target_of(method.__name__, arguments, named)
        if isinstance(target.where, int):
            number = target.where
            if target.or_first and number > len(self._shards):
                number = 1
            if self._health.is_silent(number):  # bodies of its requests must not fill the memory
                limits = Limits(min(limits.patience_s, SILENT_S), min(limits.timeout_s, SILENT_S))
            return await self._shard(number).call(limits, method, *arguments, **named)
        if target.where == "first":
            return await self._shards[0].call(limits, method, *arguments, **named)
        if target.where == "any":
            return await self._any(limits, method, *arguments, **named)
        return await self._several(target, limits, method, *arguments, **named)

    def _used(self) -> None:
        self._health.used()
        if self._sharing is not None:
            self._sharing.used()

    async def _fault(self, limits: Limits) -> str | None:
        """Return None as soon as a shard serves requests: new sessions go to one that does."""

        async def asked(number: int) -> str | None:
            try:
                fault = await self._shards[number - 1].within(limits).fault()
            except SkyrlActorsError as error:
                fault = str(error)
            return None if fault is None else f"shard {number}: {fault}"

        asking = [asyncio.ensure_future(asked(number)) for number in self._numbers]
        faults: list[str] = []
        try:
            for answer in asyncio.as_completed(asking):
                fault = await answer
                if fault is None:
                    return None
                faults.append(fault)
        finally:
            await ended(*asking)
        return f"no shard serves requests: {min(faults)}"

    def _shard(self, number: int) -> ControllerClient:
        """Return a shard. Raises NotFound for one that the service does not have."""
        if number > len(self._shards):
            raise NotFound(
                f"this belongs to shard {number}, and the service has shards.count "
                f"{len(self._shards)}; checkpoints of other shards can be loaded"
            )
        return self._shards[number - 1]

    async def _any(
        self, limits: Limits, method: Callable[..., Any], *arguments: Any, **named: Any
    ) -> Any:
        """Ask one shard after the other until one answers, within the limits of one call."""
        now = asyncio.get_running_loop().time
        until, last = now() + limits.timeout_s, Unavailable("no shard answers")
        for number in self._health.ordered(self._numbers):
            once = Limits(0.0, max(until - now(), 0.1))
            asked = self._shard(number).call(once, method, *arguments, **named)
            try:
                found = await self._health.unless_away(number, asked)
            except UserError:
                raise
            except SkyrlActorsError as error:
                last = Unavailable(f"shard {number}: {error}")
                continue
            is_table = method is ControllerCalls.known_keys and not self._has_keys
            if is_table and number > 1 and not found.keys:
                # It may not have got them yet, and without any key everybody is let in.
                last = Unavailable("API keys are not known now: the first shard does not answer")
                continue
            return found
        raise last

    async def _several(
        self,
        target: Target,
        limits: Limits,
        method: Callable[..., Any],
        *arguments: Any,
        **named: Any,
    ) -> Any:
        """Ask all shards at the same time, and join their answers."""
        assert target.merged is not None
        needs_all = target.where == "all"

        async def asked(number: int) -> Any:
            own = limits if needs_all else Limits(0.0, limits.timeout_s)
            call = self._shards[number - 1].call(own, method, *arguments, **named)
            return await (call if needs_all else self._health.unless_away(number, call))

        found = await asyncio.gather(*map(asked, self._numbers), return_exceptions=True)
        answered, away = dict[int, Any](), dict[int, SkyrlActorsError]()
        for number, one in zip(self._numbers, found, strict=True):
            if isinstance(one, SkyrlActorsError) and not isinstance(one, UserError):
                away[number] = one
            elif isinstance(one, BaseException):
                raise one
            else:
                answered[number] = one
        if away and (needs_all or not answered):
            number, error = next(iter(away.items()))
            raise Unavailable(f"shard {number}: {error}")
        joined = target.merged(answered, arguments)
        return with_silent(joined, len(found)) if method is ControllerCalls.status else joined

    def new_request_id(self, request: Request, mark: str = "") -> str:
        return f"r{shard_mark(shard_of(target_id(request)))}{uuid.uuid4().hex}{mark}"

    def copy_session_id(self, digest: str, mark: str) -> str:
        number = self._of_key(mark) if self._spread == "key" else 1
        return f"s{shard_mark(number)}{digest}{mark}"

    def _of_key(self, mark: str) -> int:
        """Return the shard of an API key's sessions."""
        owner = owner_of(f"0{mark}")
        return 1 + (int(owner, OWNER_BASE) % len(self._shards) if owner else 0)

    def _candidates(self, mark: str) -> list[int]:
        """Return the shards that may have a new session, the best one first."""
        if self._spread == "key":
            return [self._of_key(mark)]
        count, turn = len(self._shards), next(self._turns)
        return self._health.ordered([1 + (turn + i) % count for i in range(count)])

    async def create_session(self, labels: SessionLabels, mark: str = "") -> str:
        """Create a session on a shard that serves requests."""

        async def created(number: int, limits: Limits) -> str:
            session_id = f"s{shard_mark(number)}{uuid.uuid4().hex[:16]}{mark}"
            return await self._shard(number).within(limits).create_session(session_id, labels)

        return await self._placed(mark, created)

    async def open_shared_sampler(
        self, base_model: str | None, path: str | None, mark: str = ""
    ) -> Sampler:
        """Open a sampler of these weights on a shard that serves requests."""

        async def opened(number: int, limits: Limits) -> Sampler:
            calls = self._shard(number).within(limits)
            return await calls.open_sampler(None, None, base_model, path)

        return await self._placed(mark, opened)

    async def _placed(self, mark: str, made: Callable[[int, Limits], Awaitable[T]]) -> T:
        """Make something new on the best shard that answers, within the time of one call."""
        self._used()
        now = asyncio.get_running_loop().time
        until, (best, *others) = now() + self.patience_s, self._candidates(mark)
        for number in (best, *others) if others else ():
            making = made(number, Limits(0.0, min(NEXT_S, max(until - now(), 0.1))))
            try:
                return await self._health.unless_away(number, making)
            except UserError:
                raise
            except SkyrlActorsError:
                continue
        left_s = max(until - now(), 0.1)
        return await made(best, Limits(left_s, left_s))
