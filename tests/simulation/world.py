"""Simulate a service from one seed: tenants train, controllers die, and results are checked.

python -m tests.simulation.world 1234          # one seed, with a log of its events
python -m tests.simulation.world --count 10000
"""

import argparse
import asyncio
import gc
import logging
import os
import random
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from skyrl_actors.backends.backend import Backend, Capabilities
from skyrl_actors.backends.catalogue import CatalogueBackend
from skyrl_actors.config.base_models import TinyBase
from skyrl_actors.config.cluster import ClusterConfig, JournalConfig, LimitsConfig
from skyrl_actors.config.restart import RestartConfig
from skyrl_actors.controller.controller import Controller
from skyrl_actors.journal.encoding import encode
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.columns import columns_from
from skyrl_actors.messages.errors import InternalError, NotFound
from skyrl_actors.messages.example import Example
from skyrl_actors.messages.model import AdamParams, LoraSpec, LossCall, ModelSpec
from tests.simulation.backend import Machines, SimBackend, SimFactory, SimWorker, chained
from tests.simulation.clock import SimLoop
from tests.simulation.journal import Disk, SimJournal

T = TypeVar("T")


class SimCatalogue(CatalogueBackend):
    """Several simulated base models. When it is dead, none of its backends answers."""

    def __init__(self, factory: SimFactory, report: Callable[[str], None], attempts: int):
        super().__init__(factory, report, attempts)
        self.factory = factory

    @property
    def dead(self) -> bool:
        return self.factory.dead

    @dead.setter
    def dead(self, is_dead: bool) -> None:
        self.factory.dead = is_dead
        for backend in self.factory.built:
            backend.dead = is_dead


SETTLED_S = 10.0  # longer than a hanging move and the restart after it
COMMON: dict[str, Any] = {
    "journal": JournalConfig(
        snapshot_operations=3,
        snapshot_s=1e9,
    ),
    "restart": RestartConfig(max_in_a_row=1001, start_timeout_s=1e5),
    "limits": LimitsConfig(session_timeout_s=1e9),
    "checkpoint_dir": Path("/nonexistent"),
}


def config_for(names: list[str]) -> ClusterConfig:
    """Return the config of a service with these base models."""
    if len(names) == 1:
        return ClusterConfig(base_model=TinyBase(name=names[0]), **COMMON)
    bases = {name: {"base_model": {"type": "tiny", "name": name}} for name in names}
    return ClusterConfig(base_models=bases, **COMMON)


@dataclass
class World:
    """The simulated service: machines, a disk, and one controller at a time."""

    seed: int
    report: Callable[[str], None] = lambda text: None
    num_bases: int = 1
    disk: Disk = field(default_factory=Disk)
    crashes: int = 0
    to_leave: int = 0  # number of tenants that must end so that the others fit
    # Sessions without heartbeats. Each controller counts the silence from its own start.
    silent: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.machines = Machines(self.disk, self.chance, places=self.chance.randint(1, 3))
        self.fleet = {"tiny": self.machines}
        for number in range(1, self.num_bases):  # the tenants of each fit
            self.fleet[f"base{number}"] = Machines(self.disk, self.chance, places=3)
        if self.num_bases > 1:
            self.machines.places = 3
            for machines in self.fleet.values():
                machines.unload()
        self.proved: dict[str, Capabilities] = {}
        self.crowded: list[list[str]] = []
        self.controller: Controller | None = None
        self.life = asyncio.Event()  # set when the present controller dies
        self.born = asyncio.Event()

    async def begin(self) -> None:
        """Start a new controller on the same disk and machines."""
        while self.controller is None:
            controller = Controller(
                config_for(list(self.fleet)),
                self._backend(),
                SimJournal(self.disk, self.chance),
                wall=self._wall,
            )
            controller._disk.run = _nothing  # the disk is simulated
            controller.sweep_s = 1e9  # no sweeps, because they run in real threads
            controller.results.ttl_s = 1.0
            controller._capacity.session_silent_s = 10.0
            if self.chance.random() < 0.5:  # payloads of waiting requests leave memory
                controller._ledger.memory.limit, controller._ledger.memory.small = 4000, 200
                controller.results._limit_bytes = 4000
            died = asyncio.ensure_future(self.life.wait())
            self.starting: Controller | None = controller
            started = asyncio.ensure_future(controller.start())
            await asyncio.wait([started, died], return_when=asyncio.FIRST_COMPLETED)
            died.cancel()
            if started.done() and isinstance(started.exception(), InternalError):
                self.report(f"{self.now:.3f} the start failed: {started.exception()}")
                controller.backend.dead = True  # type: ignore[attr-defined]
                await asyncio.sleep(self.chance.random())
            elif started.done():
                started.result()
                self.controller, self.starting = controller, None
                self.born.set()
                self.report(f"{self.now:.3f} controller of epoch {controller.epoch} runs")
            else:
                self.life = asyncio.Event()

    def _backend(self) -> Backend:
        if self.num_bases == 1:
            return SimBackend(self.machines)
        factory = SimFactory(self.fleet, self.chance, self.proved, self.crowded)
        return SimCatalogue(factory, self.report, 1000)

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def _wall(self) -> float:
        """Return the time of a clock that jumps, also back."""
        return self.now + self.chance.uniform(-1000, 1000)

    def crash(self) -> None:
        """Stop the controller: none of its awaits returns."""
        victim = self.controller or self.starting
        if victim is None:
            return
        backend, journal = victim.backend, victim.journal
        assert isinstance(backend, SimBackend | SimCatalogue) and isinstance(journal, SimJournal)
        backend.dead = journal.dead = True
        self.crashes += 1
        was_running = self.controller is not None
        self.controller = None
        self.born.clear()
        life, self.life = self.life, asyncio.Event() if was_running else self.life
        life.set()
        if was_running:
            self.restarting = asyncio.ensure_future(self.begin())

    async def call(self, make: Callable[[Controller], Awaitable[T]]) -> T:
        """Call the controller until an answer arrives, as ingress and SDK together do."""
        while True:
            await self.born.wait()
            controller, life = self.controller, self.life
            assert controller is not None
            died, answer = (
                asyncio.ensure_future(life.wait()),
                asyncio.ensure_future(make(controller)),
            )
            await asyncio.wait([died, answer], return_when=asyncio.FIRST_COMPLETED)
            died.cancel()
            if answer.done() and not life.is_set():
                try:
                    result = answer.result()
                except InternalError as error:
                    self.report(f"{self.now:.3f} again: {error}")
                    await asyncio.sleep(self.chance.random())
                    continue
                if self.chance.random() < 0.1:
                    self.report(f"{self.now:.3f} an answer is lost")
                    continue
                return result
            answer.add_done_callback(lambda future: future.cancelled() or future.exception())

    async def run(self, request: rq.Request) -> rs.Result:
        """Submit a request and return its answer."""
        stamp = f"r{self.chance.getrandbits(64):016x}"
        request_id = await self.call(
            lambda c: c.submit(request, stamp if self.chance.random() < 0.5 else None)
        )
        return await self.answer(request_id)

    async def answer(self, request_id: str) -> rs.Result:
        while True:
            result = await self.call(lambda c: c.answers.whole(request_id, 1.0))
            if result is not None:
                return result
            await asyncio.sleep(
                0.1
            )  # virtual time must pass, even if a mutant returns None at once


class Tenant:
    """A client with one model. It compares every answer with a reference without faults."""

    def __init__(self, world: World, number: int):
        self.world = world
        self.chance = random.Random(world.seed * 1000 + number)
        self.session = f"s{number}"
        bases = list(world.fleet)
        self.machines = world.fleet[bases[number % len(bases)]]
        self.spec = ModelSpec(
            model_id=f"s{number}:train:0",
            base_model=bases[number % len(bases)],
            lora=LoraSpec(rank=4),
            seed=number,
        )
        self.truth = SimWorker({})
        self.seq = 0
        self.has_left = False
        self.samplers = 0
        self.saved: list[tuple[str, str]] = []  # samplers and their weights

    async def live(self, operations: int) -> None:
        await self.world.call(lambda c: c.create_session(self.session))
        self.truth.create_model(self.spec)
        created = await self.world.run(rq.CreateModel(spec=self.spec, session_id=self.session))
        assert created == rs.ModelCreated(self.spec.model_id), created
        done = 0
        while done < operations:
            done += await self._some()
        if self.world.to_leave:
            self.world.to_leave -= 1
            await self.leave()

    async def leave(self) -> None:
        """Free the capacity for other tenants: finish the session, or stop its heartbeats."""
        self.has_left = True
        await self.check()
        if self.chance.random() < 0.5:
            await self.world.call(lambda c: c.finish_session(self.session))
        else:
            self.world.silent.add(self.session)

    async def check(self) -> None:
        """Compare a forward pass with the reference."""
        request, expected = self._forward()
        assert encode(await self.world.run(request)) == encode(expected)

    async def _some(self) -> int:
        """Send a few requests in order, then await the answers, as a pipelining SDK does."""
        sent = []
        for _ in range(self.chance.randint(1, 4)):
            verb = self.chance.choice(
                [self._batch, self._batch, self._forward, self._step, self._sampler]
            )
            request, expected = verb()
            stamp = f"t{self.chance.getrandbits(64):016x}"
            request_id = await self.world.call(lambda c, r=request, s=stamp: c.submit(r, s))
            sent.append((request, request_id, expected))
        for request, request_id, expected in sent:
            result = await self.world.answer(request_id)
            if isinstance(result, rs.SamplerSaved):
                self.saved.append((str(result.sampler_id), expected))
                await self._sample(*self.saved[-1])
            else:
                assert encode(result) == encode(expected), (
                    f"{request}: {result} instead of {expected}"
                )
        if self.saved and self.chance.random() < 0.3:  # weights from before later steps
            await self._sample(*self.chance.choice(self.saved[-3:]))
        return len(sent)

    def _next(self) -> int:
        self.seq += 1
        return self.seq

    def _columns(self) -> Any:
        tokens = np.asarray(
            [self.chance.randint(0, 319) for _ in range(self.chance.randint(1, 4))], np.int32
        )
        return columns_from([Example(tokens, {"target_tokens": tokens})])

    def _batch(self) -> tuple[rq.Request, Any]:
        columns = self._columns()
        request = rq.ForwardBackward(
            model_id=self.spec.model_id,
            columns=columns,
            loss=LossCall("cross_entropy", {}),
            seq_id=self._next(),
        )
        return request, self.truth.add(self.spec.model_id, columns, False)

    def _forward(self) -> tuple[rq.Request, Any]:
        columns = self._columns()
        request = rq.ForwardBackward(
            model_id=self.spec.model_id,
            columns=columns,
            loss=LossCall("cross_entropy", {}),
            forward_only=True,
            seq_id=self._next(),
        )
        return request, self.truth.add(self.spec.model_id, columns, True)

    def _step(self) -> tuple[rq.Request, Any]:
        adam = AdamParams(learning_rate=self.chance.random())
        return rq.OptimStep(self.spec.model_id, adam, self._next()), rs.StepDone(
            self.truth.optim_step(self.spec.model_id, adam)
        )

    def _sampler(self) -> tuple[rq.Request, Any]:
        self.samplers += 1
        sampler_id = f"{self.session}:sample:{self.samplers}"
        request = rq.SaveForSampler(
            model_id=self.spec.model_id, sampler_id=sampler_id, seq_id=self._next()
        )
        return request, self.truth.states[self.spec.model_id].weights

    async def _sample(self, sampler_id: str, weights: str) -> None:
        params = rq.SamplingParams(max_tokens=4, seed=self.chance.randint(0, 99))
        result = await self.world.run(
            rq.Sample(sampler_id=sampler_id, prompt=(1, 2), params=params, seq_id=self._next())
        )
        assert isinstance(result, rs.SampleOutput), result
        drawn = np.frombuffer(bytes.fromhex(chained(weights, (1, 2), params.seed)), np.uint8)[:4]
        assert result.sequences[0].tokens.tolist() == drawn.tolist(), (
            "a sampler used other weights than its own"
        )


async def _nothing(*_: Any) -> None:
    pass


async def faults(world: World) -> None:
    """Cause faults in an endless loop; the seed decides their times and kinds."""
    kinds = ("crash", "rank", "half", "full disk", "power", "no memory")
    weights = [world.chance.random() for _ in kinds]
    pause_s = world.chance.choice([0.1, 0.3, 1.0])
    while True:
        await asyncio.sleep(world.chance.expovariate(1 / pause_s))
        kind = world.chance.choices(kinds, weights)[0]
        machines = world.machines
        if world.num_bases > 1:
            machines = world.chance.choice(list(world.fleet.values()))
        world.report(f"{world.now:.3f} {kind}")
        if kind in ("crash", "power") and world.silent - world.disk.ended:
            continue  # otherwise no session would be silent for long enough
        if kind == "crash":
            world.crash()
        elif kind == "rank":
            machines.kill_rank()
        elif kind == "half" and machines.rank is not None:
            machines.rank.worker.faulty = 1
        elif kind == "power":
            for each in world.fleet.values():
                each.power_cut()
            world.crash()
        elif kind == "full disk":
            world.disk.full = True
            await asyncio.sleep(world.chance.random())
            world.disk.full = False
        elif kind == "no memory":
            machines.failing_moves = world.chance.choice([0.1, 0.5, 1.0])
            await asyncio.sleep(world.chance.random() * 3)
            machines.failing_moves = 0.0


async def heartbeats(world: World, tenants: list[Tenant]) -> None:
    """Send heartbeats of all active tenants in an endless loop."""
    while True:
        await asyncio.sleep(1.0)
        for tenant in tenants:
            if world.controller is not None and not tenant.has_left:
                with suppress(NotFound):  # its session is not open yet
                    await world.controller.heartbeat(tenant.session)


async def simulate(seed: int, report: Callable[[str], None], num_bases: int = 1) -> int:
    """Run one seed. Return the number of controllers that died."""
    world = World(seed, report, num_bases)
    await world.begin()
    count = world.chance.randint(1, 3) if num_bases == 1 else num_bases + 1
    tenants = [Tenant(world, number) for number in range(count)]
    world.to_leave = max(0, len(tenants) - world.machines.places * num_bases)
    trouble = asyncio.ensure_future(faults(world))
    alive = asyncio.ensure_future(heartbeats(world, tenants))
    most = 8 if world.to_leave else 25  # tenants that wait for each other take longer
    await asyncio.gather(*(tenant.live(world.chance.randint(5, most)) for tenant in tenants))
    trouble.cancel()
    world.disk.full = False
    for machines in world.fleet.values():
        machines.failing_moves = 0.0
    await asyncio.sleep(SETTLED_S)
    await check(world, tenants)
    alive.cancel()
    return world.crashes


async def check(world: World, tenants: list[Tenant]) -> None:
    """Check the end state of the service.

    Each model equals its reference. No rank held more models than fit. The journal has an answer
    for each accepted request.
    """
    assert not world.machines.crowded, (
        f"a rank for {world.machines.places} models held {world.machines.crowded[0]}"
    )
    assert not world.crowded, f"{world.crowded[0]} were on the devices together"
    for tenant in tenants:
        if tenant.has_left:
            continue
        await tenant.check()
        if not tenant.machines.is_loaded:
            continue  # another base model took the place since
        assert tenant.machines.rank is not None
        found, truth = (
            tenant.machines.rank.worker.states[tenant.spec.model_id],
            tenant.truth.states[tenant.spec.model_id],
        )
        assert found == truth, f"{tenant.spec.model_id}: {found} instead of {truth}"
    for _ in range(100):  # queued requests of ended sessions are answered in the background
        if all(op.answered_at is not None for op in world.disk.operations.values()):
            check_usage(world.disk)
            return
        await asyncio.sleep(0.1)
    raise AssertionError("an accepted request was never answered")


def run_seed(
    seed: int, report: Callable[[str], None] = lambda text: None, num_bases: int = 1
) -> int:
    """Run one seed and return how often its controller died. Raises when a check fails."""
    logging.getLogger("skyrl_actors").setLevel(logging.CRITICAL)
    gc.collect()
    gc.disable()  # it would close coroutines of a dead controller at times that no seed decides
    loop = SimLoop(seed)
    asyncio.set_event_loop(loop)
    loop.set_exception_handler(lambda _, context: None)
    try:
        return loop.run_until_complete(simulate(seed, report, num_bases))
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        asyncio.set_event_loop(None)
        loop.close()
        gc.enable()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seed", type=int, nargs="?", help="replay this seed and print its events")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--bases", type=int, default=1, help="base models of the service")
    options = parser.parse_args()
    if options.seed is not None:
        print(f"passed: {run_seed(options.seed, print, options.bases)} controllers died")
        return
    broken = run_many(range(options.first, options.first + options.count), options.bases)
    sys.exit(f"{len(broken)} seeds failed" if broken else 0)


def verdict(seed: int, num_bases: int = 1) -> tuple[int, int, str | None]:
    """Return the seed, how often its controller died, and the traceback of a failure."""
    try:
        return seed, run_seed(seed, num_bases=num_bases), None
    except Exception:  # noqa: BLE001  any failure is reported with its seed
        return seed, 0, traceback.format_exc()


def run_many(seeds: range, num_bases: int = 1) -> list[int]:
    """Return the seeds that failed. Print each with the command that replays it."""
    started, crashes, broken = time.perf_counter(), 0, []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        verdicts = pool.map(verdict, seeds, [num_bases] * len(seeds), chunksize=10)
        for done, (seed, died, trace) in enumerate(verdicts, start=1):
            crashes += died
            if trace is not None:
                broken.append(seed)
                command = f"python -m tests.simulation.world {seed} --bases {num_bases}"
                print(f"{trace}seed {seed} failed; replay it with: {command}", flush=True)
            if done % 500 == 0 or done == len(seeds):
                spent = time.perf_counter() - started
                counts = f"{done} seeds, {crashes} controllers died, {len(broken)} failed"
                print(f"{counts}, {spent:.0f} s", flush=True)
    return broken


def check_usage(disk: Disk) -> None:
    """Check that each answered request is in the usage once, whatever died in between."""
    answered = [op for op in disk.operations.values() if op.answered_at is not None]
    assert sum(usage.requests for usage in disk.usage) == len(answered)
    assert sum(usage.failed for usage in disk.usage) == sum(op.failed for op in answered)


if __name__ == "__main__":
    main()
