"""Samplers of the base model and of saved checkpoints: open them, check them, free them.

Such a sampler is pinned to the version that its checkpoint had when it was opened. A checkpoint that was deleted, or saved again
under the same name, is not sampled through it any more.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable

from skyrl_actors.controller.execute import Executor
from skyrl_actors.controller.pinning import change_of, change_text
from skyrl_actors.controller.tenants import Sampler, TenantTable
from skyrl_actors.journal.base import Journal
from skyrl_actors.journal.entries import SamplerOpened
from skyrl_actors.messages.errors import InvalidRequest, SkyrlActorsError
from skyrl_actors.messages.paths import checked_id, parse_path

log = logging.getLogger(__name__)
Retire = Callable[[Sampler], Awaitable[None]]


def shared_id(base_model: str, version: str) -> str:
    """The id of the sampler of all requests that name these weights themselves."""
    return "direct-" + hashlib.sha256(f"{base_model} {version}".encode()).hexdigest()[:24]


class NamedSamplers:
    """`retire` ends a sampler; its weights are freed with its last sample."""

    def __init__(self, tenants: TenantTable, executor: Executor, journal: Journal, retire: Retire):
        self._tenants = tenants
        self._executor = executor
        self._journal = journal
        self._retire = retire

    async def open(
        self, sampler_id: str | None, session_id: str | None, base_model: str, path: str | None
    ) -> Sampler:  # fmt: skip
        """Idempotent by id. Without an id it is the sampler that all share who name the same weights."""
        if sampler_id is None:
            version = "base" if path is None else await self._executor.read(self._executor.folders.version, parse_path(path))
            sampler_id = shared_id(base_model, version)
        known = self._tenants.samplers.get(sampler_id)
        if known is None:
            known = await self._opened(checked_id(sampler_id, "sampler id"), session_id, base_model, path)
        known.last_used = asyncio.get_running_loop().time()
        return known

    async def _opened(self, sampler_id: str, session_id: str | None, base_model: str, path: str | None) -> Sampler:
        if session_id is not None:
            self._tenants.session(session_id)
        sampler = await self._executor.open_sampler(sampler_id, session_id, base_model, path)
        if session_id is None and path is not None and sampler_id != shared_id(base_model, sampler.weights.version):
            raise InvalidRequest(f"{path} was saved again at this moment; ask again")
        if session_id is not None:
            self._tenants.session(session_id)  # it may have ended meanwhile
        await self._journal.write(SamplerOpened(sampler_id, session_id, base_model, path, sampler.weights))
        return self._tenants.samplers.setdefault(sampler_id, sampler)

    async def free_unused(self, idle_s: float) -> None:
        """For ever: free the samplers of no session that nobody asked for `idle_s`, and those whose checkpoint is gone."""
        while True:
            await asyncio.sleep(idle_s / 10)
            for sampler in [s for s in self._tenants.samplers.values() if s.owner is None]:
                try:
                    if await self._is_over(sampler, idle_s):
                        await self._retire(sampler)
                except SkyrlActorsError as error:
                    log.warning("the checkpoint of sampler %s can not be read: %s", sampler.sampler_id, error)

    async def _is_over(self, sampler: Sampler, idle_s: float) -> bool:
        if sampler.users:
            return False
        if sampler.session_id is None and asyncio.get_running_loop().time() - sampler.last_used > idle_s:
            return True
        change = await self._executor.read(change_of, self._executor.folders, sampler)
        if change is not None:
            sampler.ended = change_text(sampler, change)
        return change is not None and sampler.sampler_id in self._tenants.samplers
