"""Call the controllers of a service that has several.

Each call goes to the shard that its id names (`shard_rules`). Only a new session has no shard yet.
"""

import asyncio
import itertools
import random
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Literal

from skyrl_actors.api.client import ControllerClient, Limits
from skyrl_actors.api.shard_rules import Target, target_id, target_of
from skyrl_actors.api.shard_status import with_silent
from skyrl_actors.api.silent_shards import SilentShards
from skyrl_actors.controller.tenants import Sampler
from skyrl_actors.messages.catalog import SessionLabels
from skyrl_actors.messages.errors import NotFound, Unavailable
from skyrl_actors.messages.paths import owner_of, shard_mark, shard_of
from skyrl_actors.messages.requests import Request
from skyrl_actors.remote import ended

NEXT_S = 5.0  # how long one of several shards that can serve a call may take
SILENT_S = 2.0  # and one that did not answer the last call
OWNER_BASE = 16  # owners are hexadecimal numbers


class ShardedClient(ControllerClient):
    """A client of all shards. `shards` are in the order of their numbers."""

    def __init__(
        self, shards: Sequence[ControllerClient], spread: Literal["session", "key"] = "session"
    ):
        super().__init__()
        self._shards = shards
        self._spread = spread
        self._health = SilentShards(shards)
        # Ingress processes begin with different shards.
        self._turns = itertools.count(random.randrange(len(shards)))

    async def close(self) -> None:
        """Stop asking the shards whether they answer."""
        await self._health.close()

    async def call(
        self, limits: Limits, method: Callable[..., Any], *arguments: Any, **named: Any
    ) -> Any:
        self._health.used()
        target = target_of(method.__name__, arguments, named)
        if isinstance(target.where, int):
            return await self._shard(target.where).call(limits, method, *arguments, **named)
        if target.where == "first":
            return await self._shards[0].call(limits, method, *arguments, **named)
        if target.where == "any":
            return await self._any(limits, method, *arguments, **named)
        return await self._several(target, limits, method, *arguments, **named)

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
        """Ask one shard after the other until one answers."""
        best_first = self._health.ordered(range(1, len(self._shards) + 1))
        once = Limits(0.0, min(NEXT_S, limits.timeout_s))
        for number in best_first:
            try:
                found = await self._shard(number).call(once, method, *arguments, **named)
            except Unavailable:
                self._health.note(number, answers=False)
            else:
                self._health.note(number, answers=True)
                return found
        return await self._shard(best_first[0]).call(limits, method, *arguments, **named)

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
            silent = self._health.is_silent(number)
            own = Limits(0.0, min(SILENT_S if silent else NEXT_S, limits.timeout_s))
            shard = self._shards[number - 1]
            return await shard.call(limits if needs_all else own, method, *arguments, **named)

        numbers = range(1, len(self._shards) + 1)
        tasks = {number: asyncio.ensure_future(asked(number)) for number in numbers}
        try:
            await asyncio.wait(tasks.values())
        finally:
            await ended(*tasks.values())
        errors = {n: error for n, task in tasks.items() if (error := task.exception())}
        failed = next((e for e in errors.values() if not isinstance(e, Unavailable)), None)
        if failed is not None:
            raise failed
        if errors and (needs_all or len(errors) == len(tasks)):
            number, error = next(iter(errors.items()))
            raise Unavailable(f"shard {number}: {error}")
        found = {number: task.result() for number, task in tasks.items() if number not in errors}
        joined = target.merged(found, arguments)
        return with_silent(joined, len(tasks)) if method.__name__ == "status" else joined

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
        self._health.used()
        *candidates, last = self._candidates(mark)
        for number in candidates:
            limits = Limits(0.0, SILENT_S if self._health.is_silent(number) else NEXT_S)
            try:
                return await self._created(number, limits, labels, mark)
            except Unavailable:
                self._health.note(number, answers=False)
        return await self._created(last, Limits(self.patience_s), labels, mark)

    async def _created(self, number: int, limits: Limits, labels: SessionLabels, mark: str) -> str:
        session_id = f"s{shard_mark(number)}{uuid.uuid4().hex[:16]}{mark}"
        return await self._shard(number).within(limits).create_session(session_id, labels)

    async def open_shared_sampler(
        self, base_model: str | None, path: str | None, mark: str = ""
    ) -> Sampler:
        """Open a sampler of these weights on a shard that serves requests."""
        self._health.used()
        *candidates, last = self._candidates(mark)
        for number in candidates:
            calls = self._shard(number).within(Limits(0.0, NEXT_S))
            try:
                return await calls.open_sampler(None, None, base_model, path)
            except Unavailable:
                self._health.note(number, answers=False)
        return await self._shard(last).calls.open_sampler(None, None, base_model, path)
