"""Delay the creation of models until the memory that they need is free.

LoRA models of a role share `lora.max_host_gib`, full fine-tunes `lora.max_full_models`. Capacity
that becomes free is granted to API keys in rotation. While a create waits, sessions without
heartbeats for `SESSION_SILENT_S` are ended. The longest silent one ends first, and only as
many as are needed end.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_actors.backends.backend import ServedModels
from skyrl_actors.config.base_configs import BaseConfigs
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.controller.administration import Administration
from skyrl_actors.controller.admission import check_count
from skyrl_actors.controller.tenants import TenantTable
from skyrl_actors.messages.errors import CapacityError, InvalidRequest, SkyrlActorsError
from skyrl_actors.messages.model import ModelKind, ModelSpec
from skyrl_actors.messages.paths import owner_of
from skyrl_actors.messages.requests import CreateModel

log = logging.getLogger(__name__)
SESSION_SILENT_S = 30.0  # SDKs send a heartbeat every 10 s
TICK_S = 0.5  # interval of the checks for silent sessions while a create waits
PASSED_S = 30.0  # smaller creates no longer overtake one that has waited for longer
SLOW_UNLOAD_S = 5.0  # capacity of a session that takes longer to unload is not counted as free
SERVED = 1000  # tenants whose last grant is stored
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingCreate:
    """A create that waits for capacity.

    `number` is the number of its operation, so that a restart keeps the order.
    """

    number: int
    request_id: str
    spec: ModelSpec
    session_id: str
    since: float
    granted: asyncio.Future[None]

    @property
    def tenant(self) -> str:
        return owner_of(self.session_id) or self.session_id


@dataclass(frozen=True, slots=True)
class Held:
    """A model that takes capacity, and its session."""

    spec: ModelSpec
    session_id: str


def in_turn(waiting: Iterable[WaitingCreate], served: Mapping[str, int]) -> list[WaitingCreate]:
    """Return the oldest create of each tenant, ordered by the tenants' last grants."""
    oldest: dict[str, WaitingCreate] = {}
    for wanted in sorted(waiting, key=lambda w: w.number):
        oldest.setdefault(wanted.tenant, wanted)
    return sorted(oldest.values(), key=lambda w: (served.get(w.tenant, 0), w.number))


class ModelCapacity:
    """Grant capacity to models, and end silent sessions when creates wait.

    `end_session` frees everything a session holds. It may take as long as a running operation.
    `elsewhere`: whether a base model, which this call names, waits for the devices.
    """

    def __init__(
        self,
        config: ClusterConfig,
        configs: BaseConfigs,
        tenants: TenantTable,
        end_session: Callable[[str], Awaitable[None]],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        admin: Administration,
        elsewhere: Callable[[str], object] = lambda base_model: None,
    ):
        self.session_silent_s = SESSION_SILENT_S
        self._config = config
        self._configs = configs
        self._tenants = tenants
        self._end_session = end_session
        self._spawn = spawn
        self._admin = admin
        self._elsewhere = elsewhere
        admin.mode.watch(lambda is_paused: None if is_paused else self._grant())
        self._bases: ServedModels | None = None
        self._held: dict[str, Held] = {}
        self._waiting: dict[str, WaitingCreate] = {}
        # Sessions whose models are being freed, and the loop time when that began.
        self._leaving: dict[str, float] = {}
        self._served: OrderedDict[str, int] = OrderedDict()
        self._turns = 0
        self._watching: asyncio.Task[None] | None = None

    def begin(self, bases: ServedModels, residents: Collection[str]) -> None:
        """Count the capacity of models that are ready or resident in the ranks after a start."""
        self._bases = bases
        for model_id, model in self._tenants.models.items():
            if model.ready or model_id in residents:
                self._held[model_id] = Held(model.spec, model.session_id)
        self._grant()

    def holds(self, model_id: str) -> bool:
        """Return whether capacity was granted to this model."""
        return model_id in self._held

    def check_key(self, model_id: str) -> None:
        """Raise CapacityError when this API key has as many models as it may have.

        Before that, silent sessions of the key are ended.
        """
        owner = owner_of(model_id)
        own = self._admin.quotas.of(owner).models
        most = self._config.limits.models_per_key if own is None else own
        while True:
            models = self._tenants.models.values()
            alive = [m.spec.model_id for m in models if not self._is_leaving(m.session_id)]
            try:
                return check_count(alive, model_id, most, "models")
            except CapacityError:
                held = {m.session_id for m in models if owner_of(m.session_id) == owner}
                silent = next((s for s in self._silent() if s in held), None)
                if silent is None:
                    raise
                self._end(silent)

    async def take(self, number: int, request_id: str, request: CreateModel) -> None:
        """Wait until there is capacity for the model.

        Raises CapacityError after `restart.start_timeout_s`, in which pauses of the service do not
        count, and InvalidRequest when its session ended.
        """
        spec, session_id = request.spec, request.session_id
        if spec.model_id in self._held:
            return
        if self._is_leaving(session_id):
            raise InvalidRequest(f"session {session_id} was finished before this ran")
        loop, wait_s = asyncio.get_running_loop(), self._config.restart.start_timeout_s
        wanted = WaitingCreate(
            number=number,
            request_id=request_id,
            spec=spec,
            session_id=session_id,
            since=loop.time(),
            granted=loop.create_future(),
        )
        self._waiting[spec.model_id] = wanted
        self._grant()
        if not wanted.granted.done():
            self._watch()
        try:
            async with self._admin.mode.timeout(wait_s):
                await wanted.granted
        except TimeoutError:
            raise CapacityError(
                f"there was no room for this model within {wait_s:g} s (restart.start_timeout_s): "
                f"{self._used(spec)}. End a session that is not needed, ask for a lower rank, "
                "or try again later"
            ) from None
        finally:
            self._waiting.pop(spec.model_id, None)

    def give_back(self, model_id: str) -> None:
        """Release the capacity of a model that was deleted or never created."""
        held = self._held.pop(model_id, None)
        if held is not None and not any(
            other.session_id == held.session_id for other in self._held.values()
        ):
            self._leaving.pop(held.session_id, None)
        self._grant()

    def withdraw(self, model_id: str, why: str) -> None:
        """Fail a create that waits. A create with granted capacity continues."""
        wanted = self._waiting.pop(model_id, None)
        if wanted is not None and not wanted.granted.done():
            wanted.granted.set_exception(InvalidRequest(why))

    def reason(self, request_id: str) -> str | None:
        """Return why this request waits for capacity, or None when it does not."""
        wanted = next((w for w in self._waiting.values() if w.request_id == request_id), None)
        return (
            None
            if wanted is None
            else f"there is no room for this model yet: {self._used(wanted.spec)}"
        )

    def status(self) -> dict[str, Any]:
        """Return the number of waiting creates, and the bytes of LoRA models by role."""
        bases = self._bases
        if bases is None:
            return {}
        used: dict[str, int] = {}
        for able in bases.bases:
            of_base = f"{able.base_model} " if len(bases.names) > 1 else ""
            for role in able.roles:
                kind = ModelKind(role, True, able.base_model)
                used[f"{of_base}{role}"] = self._needed_by(kind)
        return {
            "waiting_creates": len(self._waiting),
            "adapter_bytes": used,
            "adapter_bytes_limit": bases.default.adapters.limit_bytes,
        }

    def _grant(self) -> None:
        """Grant capacity to creates that fit; end silent sessions for those that do not."""
        if self._bases is None or self._admin.mode.is_paused:
            return
        for kind in {wanted.spec.kind for wanted in self._waiting.values()}:
            while (wanted := self._next(kind)) is not None:
                self._held[wanted.spec.model_id] = Held(wanted.spec, wanted.session_id)
                del self._waiting[wanted.spec.model_id]
                self._turns += 1
                self._served[wanted.tenant] = self._turns
                self._served.move_to_end(wanted.tenant)
                if len(self._served) > SERVED:
                    self._served.popitem(last=False)
                if not wanted.granted.done():
                    wanted.granted.set_result(None)
            self._free_for(kind)

    def _next(self, kind: ModelKind) -> WaitingCreate | None:
        free, now = self._limit(kind) - self._needed_by(kind), asyncio.get_running_loop().time()
        for wanted in in_turn(self._present(kind), self._served):
            if self._need(wanted.spec) <= free:
                return wanted
            if now - wanted.since > PASSED_S:
                return None  # keep free capacity for this create
        return None

    def _present(self, kind: ModelKind) -> list[WaitingCreate]:
        """Return waiting creates of active sessions, or those of silent ones if there are none."""
        silent = set(self._silent())
        mine = [wanted for wanted in self._waiting.values() if wanted.spec.kind == kind]
        return [wanted for wanted in mine if wanted.session_id not in silent] or mine

    def _free_for(self, kind: ModelKind) -> None:
        """End silent sessions until their capacity suffices for all waiting creates."""
        wanted = sum(self._need(w.spec) for w in self._present(kind))
        if not wanted:
            return
        coming = sum(
            self._need(h.spec)
            for h in self._held.values()
            if h.spec.kind == kind and self._leaves_soon(h.session_id)
        )
        missing = wanted + self._needed_by(kind) - self._limit(kind) - coming
        for session_id in self._silent():
            mine = [
                h for h in self._held.values() if h.session_id == session_id and h.spec.kind == kind
            ]
            if missing <= 0 or not mine:
                continue
            missing -= sum(self._need(held.spec) for held in mine)
            self._end(session_id)

    def _silent(self) -> list[str]:
        now = asyncio.get_running_loop().time()
        found = self._tenants.silent_sessions(now, self.session_silent_s)
        return [session_id for session_id in found if session_id not in self._leaving]

    def _is_leaving(self, session_id: str) -> bool:
        return session_id in self._leaving or session_id not in self._tenants.sessions

    def _leaves_soon(self, session_id: str) -> bool:
        if not self._is_leaving(session_id):
            return False
        now = asyncio.get_running_loop().time()
        bases = {h.spec.base_model for h in self._held.values() if h.session_id == session_id}
        if any(map(self._elsewhere, bases)):  # unloads of others would wait too
            self._leaving[session_id] = now
        return now - self._leaving.setdefault(session_id, now) < SLOW_UNLOAD_S

    def _end(self, session_id: str) -> None:
        log.warning(
            "session %s is silent and a create needs its memory: its models are freed", session_id
        )
        self._leaving[session_id] = asyncio.get_running_loop().time()
        self._spawn(self._ended(session_id))

    async def _ended(self, session_id: str) -> None:
        try:
            await self._end_session(session_id)
        except SkyrlActorsError as error:
            log.error("session %s was not freed: %s", session_id, error)
        finally:
            self._leaving.pop(session_id, None)

    def _watch(self) -> None:
        if self._watching is None or self._watching.done():
            self._watching = self._spawn(self._ticks())

    async def _ticks(self) -> None:
        while self._waiting:
            await asyncio.sleep(TICK_S)
            self._grant()

    def _need(self, spec: ModelSpec) -> int:
        assert self._bases is not None
        adapters = self._bases.of(spec.base_model).adapters
        return adapters.bytes_of(spec.lora.rank) if spec.lora else 1

    def _needed_by(self, kind: ModelKind) -> int:
        return sum(self._need(held.spec) for held in self._held.values() if held.spec.kind == kind)

    def _limit(self, kind: ModelKind) -> int:
        assert self._bases is not None
        able = self._bases.of(kind.base_model)
        full = self._configs.of(able.base_model).lora.max_full_models
        return able.adapters.limit_bytes if kind.is_lora else full

    def _used(self, spec: ModelSpec) -> str:
        used, limit = self._needed_by(spec.kind), self._limit(spec.kind)
        if spec.lora is None:
            return f"{used} of {limit} {spec.role} full fine-tunes are alive (lora.max_full_models)"
        return (
            f"{spec.role} LoRA models take {used / GIB:.3g} of {limit / GIB:.3g} GiB of host "
            f"memory (lora.max_host_gib), and this one needs {self._need(spec) / GIB:.3g}"
        )
