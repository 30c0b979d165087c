"""Open, check and free samplers of the base model and of saved checkpoints.

Such a sampler is pinned to the version that its checkpoint had when it was opened. When the
checkpoint is deleted, or saved again under the same name, the sampler refuses further requests.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable

from skyrl_actors.backends.backend import ServedModels
from skyrl_actors.config.shard_configs import shard_number
from skyrl_actors.controller.pinning import change_of, change_text
from skyrl_actors.controller.tenants import Sampler
from skyrl_actors.controller.verbs.verb import VerbContext
from skyrl_actors.journal.entries import SamplerOpened
from skyrl_actors.journal.protocol import Journal
from skyrl_actors.messages.errors import InvalidRequest, SkyrlActorsError
from skyrl_actors.messages.paths import checked_id, parse_path, shard_mark
from skyrl_actors.messages.weights import SamplerWeights

log = logging.getLogger(__name__)
# Subtracted because the SDK multiplies the number of a copy by 10^9 and stores it in 64 bits.
FIRST_JOIN_S = 1_750_000_000
Retire = Callable[[Iterable[Sampler]], Awaitable[None]]


def shared_id(base_model: str, version: str, shard: int = 1) -> str:
    """Return the id of the sampler that requests without a sampler id share."""
    digest = hashlib.sha256(f"{base_model} {version}".encode()).hexdigest()[:24]
    return f"direct{shard_mark(shard) or '-'}{digest}"


class NamedSamplers:
    """The samplers that belong to no live model.

    `retire` closes samplers and frees their weights after their last samples.
    """

    def __init__(self, context: VerbContext, journal: Journal, retire: Retire):
        self._tenants = context.tenants
        self._context = context
        self._shard = shard_number(context.config.name)
        self._journal = journal
        self._retire = retire
        self._opening: set[str] = set()  # ids that are counted already
        self._last_joined = 0

    def join(self, sampler_id: str, now: float) -> int:
        """Return a number that no other copy of this sampler's client has.

        It is a time in seconds, so it stays unique over restarts without being stored. Raises
        NotFound.
        """
        self._tenants.sampler(sampler_id)
        self._last_joined = max(self._last_joined + 1, int(now) - FIRST_JOIN_S)
        return self._last_joined

    async def base_of(self, base_model: str | None, path: str | None, bases: ServedModels) -> str:
        """Return the base model of a sampler. Raises UserError."""
        if not base_model and path is None:
            raise InvalidRequest(
                "the request has neither base_model nor model_path; send one of them"
            )
        if base_model or len(bases.names) == 1:
            return bases.of(base_model or "").base_model
        spec = await self._context.disk.read(self._context.folders.spec, parse_path(path or ""))
        return bases.of(spec.base_model).base_model

    async def open(
        self, sampler_id: str | None, session_id: str | None, base_model: str, path: str | None
    ) -> Sampler:
        """Open a sampler. Idempotent by id.

        Without an id, it is shared by all requests for the same weights.
        """
        if sampler_id is None:
            version = (
                "base"
                if path is None
                else await self._context.disk.read(self._context.folders.version, parse_path(path))
            )
            sampler_id = shared_id(base_model, version, self._shard)
        known = self._tenants.samplers.get(sampler_id)
        if known is None:
            known = await self._opened(
                checked_id(sampler_id, "sampler id"), session_id, base_model, path
            )
        known.last_used = asyncio.get_running_loop().time()
        return known

    async def _opened(
        self, sampler_id: str, session_id: str | None, base_model: str, path: str | None
    ) -> Sampler:
        self._context.admin.mode.check_accepts()
        if session_id is not None:
            self._tenants.session(session_id)
            self._context.check_samplers(sampler_id, opening=self._opening)
        self._opening.add(sampler_id)
        try:
            return await self._written(sampler_id, session_id, base_model, path)
        finally:
            self._opening.discard(sampler_id)

    async def _written(
        self, sampler_id: str, session_id: str | None, base_model: str, path: str | None
    ) -> Sampler:
        sampler = await self._pinned(sampler_id, session_id, base_model, path)
        if (
            session_id is None
            and path is not None
            and sampler_id != shared_id(base_model, sampler.weights.version, self._shard)
        ):
            raise InvalidRequest(
                f"{path} was saved again while it was opened; send the request again"
            )
        if session_id is not None:
            self._tenants.session(session_id)  # raises if it ended since
        entry = SamplerOpened(
            sampler_id=sampler_id,
            session_id=session_id,
            base_model=base_model,
            model_path=path,
            weights=sampler.weights,
        )
        with self._tenants.writes(sampler_id):
            await self._journal.write(entry)
            if (known := self._tenants.samplers.get(sampler_id)) is not None:
                return known
            self._tenants.put_sampler(sampler)
        if session_id is not None and session_id not in self._tenants.sessions:
            await self._retire([sampler])
            self._tenants.session(session_id)  # raises: it ended while this was written
        return sampler

    async def _pinned(
        self, sampler_id: str, session_id: str | None, base_model: str, path: str | None
    ) -> Sampler:
        """Return a sampler of the base model or of a saved checkpoint."""
        weights = SamplerWeights(version="base", base_model=base_model)
        if path is not None:
            where = parse_path(path)
            if where.kind != "sampler_weights":
                raise InvalidRequest(
                    f"{path} may be overwritten by training; "
                    "sample from what save_weights_for_sampler saved"
                )
            folder, spec, version = await self._context.disk.read(
                self._context.folders.found, where
            )
            if spec.role == "critic":
                raise InvalidRequest(
                    f"{path} is a critic: it has values, not tokens, and cannot be sampled"
                )
            if spec.base_model != base_model:
                raise InvalidRequest(
                    f"{path} belongs to base model {spec.base_model!r}, not {base_model!r}; "
                    "leave base_model out"
                )
            weights = await self._context.backend.open_sampler(base_model, str(folder), version)
        return Sampler(
            sampler_id=sampler_id,
            base_model=base_model,
            model_path=path,
            weights=weights,
            session_id=session_id,
        )

    async def free_unused(self, idle_s: float) -> None:
        """Free unused samplers in an endless loop.

        These are samplers without a session that were not used for `idle_s`, and samplers whose
        checkpoint was deleted or saved again.
        """
        while True:
            await asyncio.sleep(idle_s / 10)
            for sampler in [s for s in self._tenants.samplers.values() if s.owner is None]:
                try:
                    if await self._is_over(sampler, idle_s):
                        await self._retire([sampler])
                except SkyrlActorsError as error:
                    log.warning(
                        "the checkpoint of sampler %s cannot be read: %s",
                        sampler.sampler_id,
                        error,
                    )

    async def _is_over(self, sampler: Sampler, idle_s: float) -> bool:
        if sampler.users:
            return False
        if (
            sampler.session_id is None
            and asyncio.get_running_loop().time() - sampler.last_used > idle_s
        ):
            return True
        change = await self._context.disk.read(change_of, self._context.folders, sampler)
        if change is not None:
            sampler.ended = change_text(sampler, change)
        return change is not None and sampler.sampler_id in self._tenants.samplers
