"""Simulated ranks and engines, with messages that are delayed, reordered or lost.

The ranks outlive a controller, as the real ones do, and use the real `ExactlyOnce`. A model's state
is a hash chain over all operations on it. So an operation that is repeated, left out or reordered
changes the state.
"""

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from collections.abc import Sequence as SequenceOf
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from skyrl_actors.backends.backend import (
    AdapterMemory,
    BackendCopy,
    Capabilities,
    Mixture,
    ServedModels,
)
from skyrl_actors.colocation.phase_lock import ColocatedPhaseLock
from skyrl_actors.colocation.phases import RESIDENT, MemoryPart, Move, Phase
from skyrl_actors.colocation.residency import Residency
from skyrl_actors.groups.batcher import Batcher, Call
from skyrl_actors.groups.exactly_once import ExactlyOnce
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.errors import InternalError, PartDown, StateLost, WeightsGone
from skyrl_actors.messages.images import Picture
from skyrl_actors.messages.model import AdamParams, CheckpointForm, LossCall, ModelSpec
from skyrl_actors.messages.precondition import OpPrecondition
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import LossOutput, PartialSample, SampleOutput, Sequence
from skyrl_actors.messages.weights import SamplerWeights, WeightManifest
from skyrl_actors.workers.interface import PartCall
from tests.simulation.journal import Disk

# Parts of device memory that belong to the rank; the others belong to the engine.
OF_RANK = {MemoryPart.TRAIN_WEIGHTS, MemoryPart.GRADIENTS, MemoryPart.OPTIMIZER}


def chained(*parts: Any) -> str:
    """Return a hash of the parts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@dataclass
class State:
    """The state of a simulated model, as hashes."""

    weights: str
    moments: str = ""
    pending: tuple[str, ...] = ()

    def copy(self) -> "State":
        return State(self.weights, self.moments, self.pending)


@dataclass
class SimWorker:
    """The verbs of one rank. Tests also use it as the reference that runs them in sequence."""

    files: dict[str, Any]
    states: dict[str, State] = field(default_factory=dict)
    faulty: int = 0  # number of next verbs that fail half-way
    # Work that failed half-way once does not fail again: a second failure would be the answer.
    broken: set[str] = field(default_factory=set)
    copies: dict[int, State] = field(default_factory=dict)
    places: int = 2**31  # maximum number of models
    crowded: list[list[str]] = field(default_factory=list)  # models of each time with more

    def _put(self, model_id: str, state: State) -> None:
        self.states[model_id] = state
        if len(self.states) > self.places:
            self.crowded.append(sorted(self.states))

    def _half(self, model_id: str, work: str) -> None:
        """Fail half-way through this work, if a failure is due."""
        if self.faulty and work not in self.broken:
            self.faulty -= 1
            self.broken.add(work)
            self.states[model_id].pending += ("half",)
            raise InternalError("a verb broke off")

    def create_model(self, spec: ModelSpec) -> None:
        self._put(spec.model_id, State(chained("init", spec.seed)))

    def delete_model(self, model_id: str) -> None:
        self.states.pop(model_id, None)

    def forward_backward(self, calls: tuple[PartCall, ...], forward_only: bool) -> list[Any]:
        return [self.add(call.model_id, call.columns, forward_only) for call in calls]

    def add(self, model_id: str, columns: Columns, forward_only: bool) -> LossOutput:
        state = self.states[model_id]
        values = np.frombuffer(
            bytes.fromhex(chained(state.weights, columns.tokens.tolist())), np.uint8
        )
        if not forward_only:
            self._half(model_id, f"{columns.tokens.tolist()}")
            state.pending += (chained(columns.tokens.tolist()),)
        fields = {"logprobs": np.resize(values, columns.num_tokens).astype(np.float32)}
        return LossOutput(
            offsets=columns.offsets, fields=fields, metrics={"loss:sum": float(values[0])}
        )

    def drop_gradients(self, model_id: str) -> None:
        self.states[model_id].pending = ()

    def optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        self._half(model_id, f"{adam.learning_rate}")
        state = self.states[model_id]
        state.moments = chained(state.moments, state.pending)
        state.weights = chained(state.weights, state.moments, adam.learning_rate)
        state.pending = ()
        return {"norm": float(int(state.moments[:8], 16))}

    def save(self, model_id: str, folder: str, mark: str) -> None:
        self.files[folder] = (self.states[model_id].copy(), mark)

    def load(self, model_id: str, folder: str, with_optimizer: bool) -> None:
        saved: State = self.files[folder][0]
        self.states[model_id] = State(saved.weights, saved.moments if with_optimizer else "")

    def copy_state(self, model_id: str) -> int:
        handle = len(self.copies) + 1
        self.copies[handle] = self.states[model_id].copy()
        return handle

    def restore_state(self, spec: ModelSpec, folder: str) -> None:
        self._put(spec.model_id, self.files[folder].copy())

    def renumber(self, model_id: str, keep_optimizer: bool) -> None:
        state = self.states[model_id]
        state.pending, state.moments = (), state.moments if keep_optimizer else ""

    def export(self, model_id: str, version: str) -> None:
        self.files[f"export {version}"] = self.states[model_id].weights


class Machines:
    """The machines that outlive controllers: one rank, and exports, which a power cut removes."""

    def __init__(self, disk: Disk, chance: random.Random, places: int):
        self.disk = disk
        self.chance = chance
        self.places = places
        self.crowded: list[list[str]] = []
        self.exports: dict[str, Any] = disk.files
        self.broken: set[str] = set()
        self.is_loaded = True  # false: no process holds the base model
        self.rank: ExactlyOnce | None = self._new_rank()
        self.changed = asyncio.Event()
        self.listener: Callable[[], None] = lambda: None
        self.failing_moves = 0.0  # fraction of moves that fail

    def _new_rank(self) -> ExactlyOnce:
        """Return a rank that the present controller has adopted."""
        rank = ExactlyOnce(
            SimWorker(self.disk.files, broken=self.broken, places=self.places, crowded=self.crowded)
        )
        rank.adopt(self.disk.epoch)
        return rank

    def kill_rank(self) -> None:
        """Kill the rank; it restarts within half a second of virtual time."""
        self.rank = None
        self.changed.set()
        asyncio.get_running_loop().call_later(self.chance.random() * 0.5, self._revive)

    def unload(self) -> None:
        """End the rank for good."""
        self.rank, self.is_loaded = None, False
        self.changed.set()

    def load(self) -> None:
        self.is_loaded = True
        self._revive()

    def _revive(self) -> None:
        if self.rank is None and self.is_loaded:
            self.rank = self._new_rank()
            self.changed.set()
            self.listener()

    def power_cut(self) -> None:
        """Kill the rank, and remove all exports."""
        self.kill_rank()
        for name in [name for name in self.disk.files if name.startswith("export ")]:
            del self.disk.files[name]


class Devices:
    """Simulated device memory, moved by the real `ColocatedPhaseLock`.

    Each move takes some time. Some moves fail, and leave their part in an unusable state.
    """

    def __init__(self, machines: Machines):
        self.machines = machines
        self.chance = machines.chance
        self.resident = set(RESIDENT[Phase.TRAIN])
        self.torn: set[MemoryPart] = set()
        self.engine = asyncio.Event()  # set while the engine runs
        self.engine.set()
        self.rejoin: Callable[[], Awaitable[None]] | None = None
        self._rejoining: set[asyncio.Future[None]] = set()

    async def move(self, move: Move, to: Phase) -> int | None:
        assert move.part not in self.torn, f"{move} after an earlier move of the part failed"
        assert (move.part in self.resident) == (move.action == "free"), (
            f"{move} with {self.resident} on the devices"
        )
        await asyncio.sleep(self.chance.random() * 0.01)
        is_up = self.machines.rank is not None if move.part in OF_RANK else self.engine.is_set()
        if is_up and self.chance.random() < self.machines.failing_moves:
            await self._fail(move)
        self._do(move)
        return 0 if is_up else None

    async def _fail(self, move: Move) -> None:
        self.torn.add(move.part)
        kind = self.chance.randrange(4)
        if kind == 0:
            await asyncio.Event().wait()
        raise (InternalError("out of memory"), RuntimeError("no driver"), asyncio.CancelledError())[
            kind - 1
        ]

    def restart_now(self, move: Move, everything: bool, reason: str) -> None:
        if everything or move.part in OF_RANK:
            self.machines.kill_rank()
        if (everything or move.part not in OF_RANK) and self.engine.is_set():
            self.engine.clear()
            task = asyncio.ensure_future(self._come_back())
            self._rejoining.add(task)
            task.add_done_callback(self._rejoining.discard)
        self.torn.clear()
        self._do(move)

    def _do(self, move: Move) -> None:
        (self.resident.add if move.action == "load" else self.resident.discard)(move.part)

    async def _come_back(self) -> None:
        await asyncio.sleep(self.chance.random() * 0.5)
        assert self.rejoin is not None
        await self.rejoin()
        self.engine.set()


class SimBackend:
    """The backend of one controller on the machines.

    Messages that a dead controller sent may still arrive.
    """

    def __init__(self, machines: Machines, name: str = "tiny", parks: bool = False):
        self.machines = machines
        self.name = name
        self.chance = machines.chance
        self.devices = Devices(machines)
        start = Phase.IDLE if parks else Phase.TRAIN
        self.devices.resident = set(RESIDENT[start])
        self.phase_lock = ColocatedPhaseLock(self.devices, start, 5.0)
        self.parked = AsyncExitStack()
        self.is_here = True  # on the devices
        self.devices.rejoin = self._in_sample_phase
        self.on_lost: Callable[[str, str], None] = lambda base_model, role: None
        self.lost: str | None = None
        self.dead = False
        self.epoch = 0
        self.sampled: set[str] = set()
        self.in_use: Counter[str] = Counter()  # running samples, by the path of their weights
        self._batcher = Batcher(self._compute, 8)  # 8 tokens, so that some calls wait

    async def _send(self, work: Callable[[ExactlyOnce], Any]) -> Any:
        """Send a message to the rank and return the answer.

        The message arrives even if its sender dies.
        """
        if self.dead:
            await asyncio.Event().wait()
        rank = self.machines.rank
        if rank is None:
            raise PartDown("the rank is dead")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def arrive() -> None:
            if self.machines.rank is not rank:
                error: Exception = StateLost("the rank died")
            else:
                try:
                    result = work(rank)
                except Exception as raised:  # noqa: BLE001  sent to the caller
                    error = raised
                else:
                    loop.call_later(
                        self.chance.random() * 0.01,
                        lambda: answer.done() or answer.set_result(result),
                    )
                    return
            loop.call_later(
                self.chance.random() * 0.01, lambda: answer.done() or answer.set_exception(error)
            )

        late = self.chance.random() < 0.05  # so late that a newer controller may run
        loop.call_later(self.chance.random() * (3.0 if late else 0.05), arrive)
        result = await answer
        if self.dead:
            await asyncio.Event().wait()
        if self.machines.rank is not rank:
            raise StateLost("the rank died before it could answer")
        return result

    async def _apply(
        self, spec: ModelSpec, precondition: OpPrecondition, method: str, *args: Any
    ) -> Any:
        epoch = self.epoch
        phase = (
            Phase.TRAIN
            if method in ("create_model", "forward_backward", "drop_gradients", "export")
            else Phase.STEP
        )
        async with self._same_rank(phase):
            if method in ("optim_step", "load", "restore_state"):
                self._let_go(spec.model_id)
            result = await self._send(
                lambda rank: rank.apply(epoch, spec.model_id, precondition, method, *args)
            )
            assert self.devices.resident >= RESIDENT[phase], f"{method} in {self.devices.resident}"
            assert not self.devices.torn, f"{method} with {self.devices.torn} half-way"
            return result

    @asynccontextmanager
    async def _same_rank(self, phase: Phase) -> AsyncGenerator[None]:
        before = self.machines.rank
        async with self.phase_lock.hold(phase):
            if self.machines.rank is not before and not self.dead:
                raise PartDown("the rank was restarted while this call waited for its phase")
            yield

    def _let_go(self, model_id: str) -> None:
        """Drop some exports of a model that no sample uses, because its weights change now."""
        for path in sorted(self.sampled):
            if (
                path.startswith(f"export {model_id}@")
                and not self.in_use[path]
                and self.chance.random() < 0.3
            ):
                self.machines.exports.pop(path, None)

    async def stand_by(self) -> None: ...

    async def start(self, epoch: int) -> ServedModels:
        self.epoch = epoch
        self.machines.listener = lambda: self.dead or self.on_lost(self.name, "policy")
        await self._up()
        try:
            await self.residents()
        except StateLost:
            await self._up()
        able = Capabilities(
            base_model=self.name,
            base_folder=f"/models/{self.name}",
            vocab_size=320,
            max_context_tokens=512,
            max_sample_tokens=512,
            roles=("policy",),
            adapters=AdapterMemory(4 * self.machines.places, 1),
        )
        return ServedModels((able,))

    async def ready(self, spec: ModelSpec) -> None:
        await self._up()

    async def _up(self) -> None:
        while self.machines.rank is None:
            self.machines.changed.clear()
            await self.machines.changed.wait()
        if self.dead:
            await asyncio.Event().wait()

    def holding(self, base_model: str) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def residents(self) -> dict[str, int]:
        epoch = self.epoch
        try:
            return await self._send(lambda rank: rank.adopt(epoch))
        except StateLost:
            return {}

    async def create_model(self, spec: ModelSpec, precondition: OpPrecondition) -> None:
        await self._apply(spec, precondition, "create_model", spec)

    async def delete_model(self, spec: ModelSpec) -> None:
        epoch = self.epoch
        await self._send(lambda rank: rank.delete(epoch, spec.model_id))

    async def forward_backward(
        self,
        spec: ModelSpec,
        precondition: OpPrecondition,
        columns: Columns,
        loss: LossCall | None,
        forward_only: bool,
        weight: float = 1.0,
    ) -> LossOutput:
        async with self._same_rank(Phase.TRAIN):
            return await self._batcher.run(
                Call(
                    model_id=spec.model_id,
                    precondition=precondition,
                    columns=columns,
                    loss=loss,
                    forward_only=forward_only,
                    weight=weight,
                )
            )

    async def _compute(self, calls: SequenceOf[Call]) -> list[Any]:
        epoch = self.epoch
        preconditions = [call.precondition for call in calls]
        parts = [
            PartCall(model_id=call.model_id, rows=(), columns=call.columns, loss=call.loss)
            for call in calls
        ]
        return await self._send(
            lambda rank: rank.forward_backward(epoch, preconditions, parts, calls[0].forward_only)
        )

    async def drop_gradients(self, spec: ModelSpec, precondition: OpPrecondition) -> None:
        await self._apply(spec, precondition, "drop_gradients", spec.model_id)

    async def optim_step(
        self, spec: ModelSpec, precondition: OpPrecondition, adam: AdamParams
    ) -> dict[str, float]:
        return await self._apply(spec, precondition, "optim_step", spec.model_id, adam)

    async def save_checkpoint(
        self,
        spec: ModelSpec,
        precondition: OpPrecondition,
        folder: str,
        form: CheckpointForm,
        mark: str,
    ) -> None:
        await self._apply(spec, precondition, "save", spec.model_id, folder, mark)

    async def load_checkpoint(
        self,
        spec: ModelSpec,
        precondition: OpPrecondition,
        folder: str,
        with_optimizer: bool,
        mix: Mixture = None,
    ) -> None:
        await self._apply(spec, precondition, "load", spec.model_id, folder, with_optimizer)

    async def copy_state(self, spec: ModelSpec, precondition: OpPrecondition) -> BackendCopy:
        handle = await self._apply(spec, precondition, "copy_state", spec.model_id)
        return BackendCopy(handle=handle, seconds=0.0)

    async def write_state(self, spec: ModelSpec, copy: BackendCopy, folder: str) -> None:
        def work(rank: ExactlyOnce) -> None:
            if copy.handle not in rank.worker.copies:
                raise InternalError("that copy is gone")
            self.machines.disk.files[folder] = rank.worker.copies[copy.handle]

        await self._send(work)

    async def restore(self, spec: ModelSpec, precondition: OpPrecondition, folder: str) -> None:
        await self._apply(spec, precondition, "restore_state", spec, folder)

    async def renumber(
        self, spec: ModelSpec, precondition: OpPrecondition, keep_optimizer: bool
    ) -> None:
        await self._apply(spec, precondition, "renumber", spec.model_id, keep_optimizer)

    async def save_for_sampler(
        self, spec: ModelSpec, precondition: OpPrecondition, version: str, written: bool = False
    ) -> SamplerWeights:
        await self._apply(spec, precondition, "export", spec.model_id, version)
        return SamplerWeights(
            version=version,
            parts=(
                WeightManifest(version=version, kind="lora", path=f"export {version}", num_bytes=1),
            ),
            base_model=self.name,
        )

    async def has_sampler(self, weights: SamplerWeights) -> bool:
        return all(part.path in self.machines.exports for part in weights.parts)

    async def open_sampler(self, base_model: str, folder: str, version: str) -> SamplerWeights:
        return SamplerWeights(
            version=version,
            parts=(WeightManifest(version=version, kind="lora", path=folder, num_bytes=1),),
        )

    async def drop_sampler(self, weights: SamplerWeights) -> None:
        for part in weights.parts:
            self.machines.exports.pop(part.path, None)

    def runs(self, base_model: str) -> bool:
        return True

    def unfreed(self) -> list[SamplerWeights]:
        return []

    async def sample(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        weights: SamplerWeights,
        pictures: tuple[Picture, ...] = (),
    ) -> SampleOutput:
        path = weights.parts[0].path
        self.in_use[path] += 1
        try:
            return await self._sampled(prompt, params, weights)
        finally:
            self.in_use[path] -= 1

    async def _sampled(
        self, prompt: tuple[int, ...], params: SamplingParams, weights: SamplerWeights
    ) -> SampleOutput:
        while not await self._computed():
            await self.devices.engine.wait()
        if self.dead:
            await asyncio.Event().wait()
        found = self.machines.exports.get(weights.parts[0].path)
        if found is None:
            error = WeightsGone if isinstance(self, ParkableSim) else InternalError
            raise error(f"no adapter found for {weights.version}")
        self.sampled.add(weights.parts[0].path)
        drawn = np.frombuffer(bytes.fromhex(chained(found, prompt, params.seed)), np.uint8)[
            : params.max_tokens
        ]
        one = Sequence(
            tokens=drawn.astype(np.int32), logprobs=drawn.astype(np.float32), stop_reason="length"
        )
        return SampleOutput(sequences=(one,), version=weights.version)

    async def _computed(self) -> bool:
        """Spend the time of a sample. Return False when the engine was down."""
        async with self.phase_lock.hold(Phase.SAMPLE):
            if self.devices.engine.is_set():
                await asyncio.sleep(self.chance.random() * 0.05)
                assert self.devices.resident == RESIDENT[Phase.SAMPLE], (
                    f"sampled in {self.devices.resident}"
                )
                assert not self.devices.torn, f"sampled with {self.devices.torn} half-way"
                return True
        return False

    async def _in_sample_phase(self) -> None:
        async with self.phase_lock.hold(Phase.SAMPLE):
            pass

    async def partial(self, request_id: str, have: int, timeout_s: float) -> PartialSample:
        await asyncio.sleep(timeout_s)
        return PartialSample()

    def end_stream(self, request_id: str) -> None:
        pass

    def waiting(self, base_model: str, request_id: str = "") -> str | None:
        return None

    def fault(self) -> str | None:
        return self.phase_lock.fault() or (
            None if self.machines.rank is not None else "the group restarts"
        )

    async def status(self) -> dict[str, Any]:
        return {}

    async def detach(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def _alive(self) -> None:
        if self.dead:
            await asyncio.Event().wait()


class SimFactory:
    """Several base models on the same devices, each with machines of its own.

    `known` outlives controllers, as the journal's folder does. `crowded` lists the base models of
    each time when more were on the devices than fit.
    """

    lost = None

    def __init__(
        self,
        fleet: dict[str, Machines],
        chance: random.Random,
        known: dict[str, Capabilities],
        crowded: list[list[str]],
    ):
        self.crowded = crowded
        self.fleet, self.chance, self._known = fleet, chance, known
        self.built: list[ParkableSim] = []
        self.dead = False
        self.capacity = 1

    def check_room(self) -> None:
        here = [one.name for one in self.built if one.is_here]
        if len(here) > self.capacity:
            self.crowded.append(here)

    async def stand_by(self) -> None: ...

    async def reserve(self) -> Residency:
        self.capacity = self.chance.randint(1, len(self.fleet))
        return Residency(
            dict.fromkeys(self.fleet, 1),
            self.capacity,
            min_residence_s=self.chance.random(),
            idle_s=0.2,
            max_loaded=self.chance.randint(1, len(self.fleet)),
        )

    def build(self, name: str) -> "ParkableSim":
        self.built.append(ParkableSim(self.fleet[name], name, self.check_room))
        self.built[-1].dead = self.dead
        return self.built[-1]

    def known(self, name: str) -> Capabilities | None:
        return self._known.get(name)

    async def learn(self, able: Capabilities) -> None:
        self._known[able.base_model] = able

    async def detach(self) -> None:
        pass

    def release(self) -> None:
        pass


class ParkableSim(SimBackend):
    """A backend whose memory leaves the devices while another base model is there."""

    def __init__(self, machines: Machines, name: str, check_room: Callable[[], None]):
        super().__init__(machines, name, parks=True)
        self.is_here = False
        self._check_room = check_room

    async def take_over(self, epoch: int) -> Capabilities | None:
        """Park a rank that runs. Its processes may be half loaded, and are ended then."""
        await self._alive()
        if self.machines.rank is None or self.chance.random() < 0.1:
            self.machines.unload()
            return None
        await self.park()
        return (await super().start(epoch)).default

    async def start(self, epoch: int) -> ServedModels:
        await asyncio.sleep(self.chance.random())
        await self._alive()
        if self.chance.random() < 0.1:
            raise InternalError("a process died while it was loaded")
        self.machines.load()
        self._come()
        return await super().start(epoch)

    def _come(self) -> None:
        self.is_here = True
        self._check_room()

    async def park(self) -> None:
        await self._alive()
        await self.parked.enter_async_context(self.phase_lock.hold(Phase.IDLE))
        await self._alive()
        assert not self.devices.resident, "memory stayed on the devices"
        self.is_here = False

    async def close(self) -> None:
        """End the rank. A dead controller ends nothing."""
        if not self.dead:
            await self.parked.aclose()
            self.is_here = False
            self.machines.unload()

    async def resume(self) -> None:
        await self._alive()
        self._come()
        await self.parked.aclose()
