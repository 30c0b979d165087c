"""A cluster of 1,024 GPUs and 1,000 tenants in virtual time, with the real controller.

    python -m bench.scale_cluster [--hours 24]

Real: controller, journal with its files, retention, fair queues, batches of the training group, and
the choice of an engine. Simulated: time, passes, engines (128 of 4 GPUs) and clients. Threads run
in place, because virtual time passes only between callbacks.

Tokens are counted in units of 8: an answer of 4,096 tokens is an array of 512. With `--unit 64` the
journal of a day fits on a disk of 32 GiB. The engines can sample less than the tenants ask for, so
what each tenant gets is decided by the queues. SIGINT ends it at the next reading, with results.
"""

import argparse
import asyncio
import os
import random
import resource
import signal
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import psutil
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.pool import Pool

from bench.harness import emit
from bench.simulated_cluster import PLACES, Farm, InPlace, VirtualLoop
from skyrl_actors import heap
from skyrl_actors.config.cluster import (
    ClusterConfig,
    JournalConfig,
    LimitsConfig,
    LoraConfig,
)
from skyrl_actors.controller.controller import Controller
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages.catalog import SessionLabels
from skyrl_actors.messages.columns import Columns, offsets_of
from skyrl_actors.messages.errors import CapacityError, Unavailable
from skyrl_actors.messages.example import TARGETS
from skyrl_actors.messages.model import AdamParams, LoraSpec, LossCall, ModelSpec
from skyrl_actors.messages.results import Failure, Result, SampleOutput

HOUR_S = 3600.0
BEGIN_OF_TIME = 1.8e9


def wall() -> float:
    return BEGIN_OF_TIME + asyncio.get_running_loop().time()


@dataclass(frozen=True)
class Kind:
    """A kind of tenant: how much it samples for one step, and the pause after the step.

    `loops` of its steps run at once, so that with two it always has samples that wait.
    """

    name: str
    count: int
    prompts: int
    samples: int
    longest: int
    pause_s: float
    loops: int


PROMPT_TOKENS = 512
KINDS_OF_TENANTS = (
    Kind("light", 700, prompts=4, samples=8, longest=2048, pause_s=600.0, loops=1),
    Kind("steady", 250, prompts=32, samples=8, longest=8192, pause_s=0.0, loops=2),
    Kind("bursty", 50, prompts=128, samples=8, longest=8192, pause_s=0.0, loops=2),
)


@dataclass
class Tenant:
    """A key with one session and one model, which trains by reinforcement."""

    kind: Kind
    number: int
    farm: Farm
    tokens: int = 0  # sampled
    trained: int = 0  # tokens of passes
    begun: int = 0  # steps
    steps: int = 0  # that ended
    refused: int = 0
    seq: int = 0
    chance: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self.owner = f"{self.number:010x}"
        self.session = f"s{self.number:04x}k{self.owner}"
        self.model = f"{self.session}:train:0"
        self.chance = random.Random(self.number)

    async def run(self, controller: Controller, request: rq.Request) -> Result:
        self.seq += 1
        request_id = f"r{self.number:04x}{self.seq:012x}k{self.owner}"
        self.farm.sent[request_id] = asyncio.get_running_loop().time(), self.kind.name
        while True:
            try:
                await controller.submit(request, request_id)
                break
            except (CapacityError, Unavailable):
                self.refused += 1
                await asyncio.sleep(5 + 5 * self.chance.random())
        while (found := await controller.answers.whole(request_id, 600.0)) is None:
            pass
        if isinstance(found, Failure):
            raise RuntimeError(found.message)
        return found

    async def live(self, controller: Controller) -> None:
        await asyncio.sleep(600 * self.chance.random())
        await controller.create_session(self.session, SessionLabels())
        spec = ModelSpec(model_id=self.model, base_model="tiny", lora=LoraSpec(rank=32))
        await self.run(controller, rq.CreateModel(spec=spec, session_id=self.session))
        self.beating = asyncio.ensure_future(self.beat(controller))
        await asyncio.gather(*(self.loop(controller) for _ in range(self.kind.loops)))

    async def loop(self, controller: Controller) -> None:
        while True:
            await self.step(controller)
            await asyncio.sleep(self.kind.pause_s * 2 * self.chance.random())

    async def beat(self, controller: Controller) -> None:
        while True:  # SDKs do it every 10 s
            await asyncio.sleep(120)
            await controller.heartbeat(self.session)

    async def step(self, controller: Controller) -> None:
        sampler = f"{self.session}:sample:{self.begun}"
        self.begun += 1
        await self.run(
            controller,
            rq.SaveForSampler(model_id=self.model, sampler_id=sampler, seq_id=self.next()),
        )
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(self.sample(controller, sampler))
                for _ in range(self.kind.prompts)
            ]
        prompt = PROMPT_TOKENS // self.farm.unit
        lengths = [length + prompt for one in asked for length in one.result()]
        await self.run(
            controller,
            rq.ForwardBackward(
                model_id=self.model,
                columns=rows_of(lengths),
                loss=LossCall("ppo", {}),
                seq_id=self.next(),
            ),
        )
        self.trained += sum(lengths)
        adam = AdamParams(learning_rate=1e-5)
        await self.run(controller, rq.OptimStep(self.model, adam, self.next()))
        self.steps += 1

    async def sample(self, controller: Controller, sampler: str) -> list[int]:
        unit = self.farm.unit
        prompt = tuple(self.chance.randrange(152_000) for _ in range(PROMPT_TOKENS // unit))
        params = rq.SamplingParams(
            max_tokens=self.kind.longest // unit, num_samples=self.kind.samples, seed=self.seq
        )
        result = await self.run(
            controller,
            rq.Sample(sampler_id=sampler, prompt=prompt, params=params, seq_id=self.next()),
        )
        assert isinstance(result, SampleOutput)
        lengths = [len(one.tokens) for one in result.sequences]
        self.tokens += sum(lengths)
        return lengths

    def next(self) -> int:
        self.seq += 1
        return self.seq


def rows_of(lengths: list[int]) -> Columns:
    total = sum(lengths)
    fields: dict[str, Any] = {
        TARGETS: np.ones(total, np.int32),
        "logprobs": np.full(total, -1.0, np.float32),
        "advantages": np.ones(total, np.float32),
    }
    return Columns(tokens=np.ones(total, np.int32), offsets=offsets_of(lengths), fields=fields)


def jain(shares: list[float]) -> float:
    """Return Jain's index: 1 if all have the same, 1/n if one has everything (Jain, 1984)."""
    return sum(shares) ** 2 / (len(shares) * sum(x * x for x in shares))


def controller_on(folder: Path, farm: Farm, options: argparse.Namespace) -> Controller:
    places = len(farm.pool.engines) * PLACES
    config = ClusterConfig(
        checkpoint_dir=folder / "checkpoints",
        critic=None,
        journal=JournalConfig(
            folder=folder / "journal",
            retention_s=options.retention_s,
            snapshot_operations=options.snapshot_operations,
        ),
        lora=LoraConfig(max_adapters=1024),
        limits=LimitsConfig(samples_in_flight=places, open_requests=65_536),
    )
    journal = SqlJournal(config.journal, KINDS, wall)
    controller = Controller(config, farm, journal, wall=wall)
    pools: Any = dict.fromkeys(controller._disk._pools, InPlace())
    controller._disk._pools = pools
    in_place(controller._examiner)
    return controller


def in_place(part: Any) -> None:
    """Replace the thread pools of a part of the service."""
    for name, value in list(vars(part).items()):
        if isinstance(value, ThreadPoolExecutor):
            setattr(part, name, InPlace())


async def started(
    folder: Path, farm: Farm, options: argparse.Namespace
) -> tuple[Controller, float]:
    controller = controller_on(folder, farm, options)
    began = time.perf_counter()
    opening = controller.journal.open

    async def opened(*arguments: Any) -> Any:
        state = await opening(*arguments)
        journal: Any = controller.journal
        for part in (journal, journal._commits, journal._store):
            in_place(part)
        return state

    controller.journal.open = opened  # type: ignore[method-assign]
    await controller.start()
    return controller, time.perf_counter() - began


Reading = dict[str, Any]  # what one interval showed


class Recorder:
    """Reads the simulation at intervals. Shares are counted after a quarter of the time."""

    def __init__(self, controller: Controller, tenants: list[Tenant], farm: Farm, folder: Path):
        self.controller, self.tenants, self.farm, self.folder = controller, tenants, farm, folder
        self.readings: list[Reading] = []
        self._at_warm: list[tuple[int, int]] = [(0, 0)] * len(tenants)
        self._cpu_s, self._busy_s, self._number = time.process_time(), 0.0, 0
        self._is_ended = False

    def end(self, *_: Any) -> None:
        """Let `follow` end at the next reading; a handler of signals."""
        self._is_ended = True

    async def follow(self, hours: float, every_s: float) -> None:
        loop, is_warm = asyncio.get_running_loop(), False
        while loop.time() < hours * HOUR_S and not self._is_ended:
            await asyncio.sleep(every_s)
            if not is_warm and loop.time() >= hours * HOUR_S / 4:
                is_warm = True
                self._at_warm = [(tenant.tokens, tenant.trained) for tenant in self.tenants]
            self.readings.append(self._read(loop.time() / HOUR_S, every_s))
            print(self.readings[-1], file=sys.stderr, flush=True)

    def jain(self) -> dict[str, float]:
        """Return Jain's index of the tenants that never pause: of sampled and trained tokens."""
        got = [
            (tenant.tokens - sampled, tenant.trained - trained)
            for tenant, (sampled, trained) in zip(self.tenants, self._at_warm, strict=True)
            if not tenant.kind.pause_s
        ]
        sampled, trained = ([float(one) for one in column] for column in zip(*got, strict=True))
        return {"sampled": round(jain(sampled), 3), "trained": round(jain(trained), 3)}

    def _read(self, hour: float, seconds: float) -> Reading:
        """Return sizes, the CPU time of this process, and waits in virtual seconds."""
        cpu_s, busy_s = time.process_time(), self.farm.busy_s
        number = self.controller._ledger.next_number
        files = (self.folder / "journal").rglob("*")
        reading = {
            "hour": round(hour, 2),
            "cpu_s": round(cpu_s - self._cpu_s, 1),
            "rss_mib": round(psutil.Process().memory_info().rss / 2**20, 1),
            "journal_mib": round(sum(f.stat().st_size for f in files if f.is_file()) / 2**20),
            "rows": _rows(self.controller.journal),
            "open_requests": self.controller.queue.num_open,
            "operations": number - self._number,
            "engines_busy": round(
                (busy_s - self._busy_s) / (seconds * len(self.farm.pool.engines)), 3
            ),
            "waits": {
                what: {
                    "p50": round(statistics.median(found), 2),
                    "p95": round(statistics.quantiles(found, n=20)[-1], 2),
                }
                for what, found in sorted(self.farm.waits.items())
                if len(found) > 1
            },
        }
        self._cpu_s, self._busy_s, self._number = cpu_s, busy_s, number
        self.farm.waits.clear()
        return reading


def _rows(journal: Any) -> int:
    with journal.store.engine.connect() as connection:
        return int(connection.execute(sa.text("SELECT count(*) FROM operations")).scalar_one())


async def simulated(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    farm = Farm(options.seed, options.slow, options.engines, options.unit)
    controller, _ = await started(folder, farm, options)
    kinds = [
        kind
        for kind in KINDS_OF_TENANTS
        for _ in range(max(1, kind.count * options.tenants // 1000))
    ]
    tenants = [Tenant(kind, number, farm) for number, kind in enumerate(kinds)]
    heap.keep_present_objects()
    living = [asyncio.ensure_future(tenant.live(controller)) for tenant in tenants]
    recorder = Recorder(controller, tenants, farm, folder)
    signal.signal(signal.SIGINT, recorder.end)
    following = asyncio.ensure_future(recorder.follow(options.hours, options.every_s))
    await asyncio.wait([following, *living], return_when=asyncio.FIRST_COMPLETED)
    for one in living:
        if one.done():
            one.result()
    following.result()
    for one in living:
        one.cancel()
    await controller.journal.close()
    again, restart_s = await started(folder, farm, options)
    found = {
        "slow": options.slow,
        "tenants": len(tenants),
        "unit": options.unit,
        "jain": recorder.jain(),
        "hours": recorder.readings[-1]["hour"],
        "restart_s": round(restart_s, 2),
        "open_at_restart": again.queue.num_open,
        "steps": {
            kind.name: sum(t.steps for t in tenants if t.kind is kind) for kind in KINDS_OF_TENANTS
        },
        "refused": sum(t.refused for t in tenants),
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10),
        "readings": recorder.readings,
    }
    await again.journal.close()
    return found


def plot(found: dict[str, Any], path: Path) -> None:
    """Draw waits, CPU time and sizes over the virtual hours."""
    readings = found["readings"]
    hours = [one["hour"] for one in readings]
    _, (waits, cpu, sizes) = plt.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
    for what in sorted({name for one in readings for name in one["waits"]}):
        if what.endswith("sample"):
            values = [one["waits"].get(what, {}).get("p95", float("nan")) for one in readings]
            waits.plot(hours, values, label=what.removesuffix(" sample"))
    waits.set(title="wait of a sample, p95", ylabel="virtual seconds", yscale="log")
    waits.legend()
    cpu.plot(hours, [1e3 * one["cpu_s"] / one["operations"] for one in readings])
    cpu.set(title="CPU of an operation", ylabel="ms", ylim=0)
    sizes.plot(hours, [one["rss_mib"] for one in readings], label="memory")
    sizes.plot(hours, [one["journal_mib"] for one in readings], label="journal (30 min kept)")
    sizes.set(title="sizes", ylabel="MiB", ylim=0)
    sizes.legend()
    for each in (waits, cpu, sizes):
        each.set_xlabel("virtual hours")
    plt.savefig(path)


def unsynced(connection: Any, *_: Any) -> None:
    """Let commits to SQLite, as all writes here, not wait for the disk."""
    connection.execute("PRAGMA synchronous=OFF")


def failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """End the simulation at the first error in the background."""
    loop.default_exception_handler(context)
    loop.stop()  # run_until_complete raises


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--every-s", type=float, default=900.0)
    parser.add_argument("--tenants", type=int, default=1000)
    parser.add_argument("--engines", type=int, default=128)
    parser.add_argument("--unit", type=int, choices=(8, 16, 32, 64), default=8)
    parser.add_argument("--retention-s", type=float, default=1800.0)
    parser.add_argument("--snapshot-operations", type=int, default=100)
    parser.add_argument("--slow", choices=("sampling", "training"), default="sampling")
    parser.add_argument("--plot", type=Path, help="also draw the readings in this SVG file")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    os.fsync = lambda descriptor: None  # this measures CPU time and sizes, not the disk
    event.listen(Pool, "checkout", unsynced)
    with tempfile.TemporaryDirectory(prefix="bench-cluster-") as scratch:
        loop = VirtualLoop()
        asyncio.set_event_loop(loop)
        loop.set_exception_handler(failed)
        found = loop.run_until_complete(simulated(options, Path(scratch)))
        emit("scale_cluster", found)
        if options.plot:
            plot(found, options.plot)


if __name__ == "__main__":
    main()
