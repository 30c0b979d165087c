"""The cost of durability: operations of a controller with and without a journal, and snapshots.

It runs in one process, with a backend that computes nothing and 4 KiB of token data for each
operation. `submit` returns when the operation is durable. One run measures both ways alternately.
"""

import argparse
import asyncio
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import base_folder, emit
from skyrl_actors.config.base_models import TinyBase
from skyrl_actors.config.cluster import ClusterConfig, JournalConfig, LimitsConfig
from skyrl_actors.controller import progress
from skyrl_actors.controller.controller import Controller
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal.entries import Entry, JournalState
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.journal.protocol import Journal
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.model import LoraSpec, LossCall, ModelSpec
from skyrl_actors.messages.requests import CreateModel, ForwardBackward
from tests.fakes import FakeBackend

OPERATIONS, MODELS = 1000, 8
PAYLOAD_TOKENS = 4096 // 12  # token, target and weight have 4 bytes each


@dataclass(frozen=True)
class Load:
    """Clients that submit one operation after another, or arrivals at a constant rate.

    At a constant rate, an operation does not wait for earlier ones, and its wait counts from the
    time at which it is due.
    """

    clients: int = 0
    per_s: float = 0.0


LOADS = Load(clients=1), Load(per_s=1000), Load(clients=16)


class NoJournal(SqlJournal):
    """A journal that writes nothing, to measure the rest of the controller."""

    async def open(self, holder: str, wait: bool = False) -> JournalState:
        return JournalState(epoch=1, next_number=1)

    async def write(self, *entries: Entry) -> None:
        pass

    async def close(self) -> None:
        pass


async def measure(make: Callable[[Path], Journal], scratch: Path, load: Load) -> dict[str, float]:
    progress.SNAPSHOT_BYTES = 2**60
    config = ClusterConfig(
        base_model=TinyBase(name="tiny"),
        checkpoint_dir=scratch / "c",
        limits=LimitsConfig(open_requests=10**6),
        journal=JournalConfig(folder=scratch / "journal", snapshot_operations=10**9),
    )
    controller = Controller(config, FakeBackend(), make(scratch / "journal"))
    await controller.start()
    session = await controller.create_session()
    models = [f"{session}:train:{i}" for i in range(MODELS)]
    for model_id in models:
        await controller.answers.whole(
            await controller.submit(
                CreateModel(
                    spec=ModelSpec(model_id=model_id, base_model="tiny", lora=LoraSpec(rank=1)),
                    session_id=session,
                )
            ),
            30,
        )
    tokens = np.ones(PAYLOAD_TOKENS, np.int32)
    columns = Columns(
        tokens=tokens,
        offsets=np.array([0, PAYLOAD_TOKENS]),
        fields={"target_tokens": tokens, "weights": np.ones(PAYLOAD_TOKENS, np.float32)},
    )
    waits: list[float] = []

    async def submit(index: int, due: float) -> str:
        request = ForwardBackward(
            model_id=models[index % MODELS], columns=columns, loss=LossCall("cross_entropy", {})
        )
        request_id = await controller.submit(request)
        waits.append(1e3 * (time.perf_counter() - due))
        return request_id

    async def client(index: int) -> list[str]:
        return [await submit(index, time.perf_counter()) for _ in range(OPERATIONS // load.clients)]

    async def arrivals(started: float) -> list[str]:
        submits = []
        for index in range(OPERATIONS):
            due = started + index / load.per_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            submits.append(asyncio.create_task(submit(index, due)))
        return await asyncio.gather(*submits)

    started = time.perf_counter()
    ids = await (
        asyncio.gather(*(client(i) for i in range(load.clients)))
        if load.clients
        else asyncio.gather(arrivals(started))
    )
    accepted_s = time.perf_counter() - started
    for request_id in (request_id for some in ids for request_id in some):
        await controller.answers.whole(request_id, 60)
    answered_s = time.perf_counter() - started
    await controller.close()
    return {
        "accepted_per_s": len(waits) / accepted_s,
        "answered_per_s": len(waits) / answered_s,
        "submit_ms_p50": statistics.median(waits),
        "submit_ms_p99": statistics.quantiles(waits, n=100)[98],
    }


async def compared(load: Load, url: str | None, repeats: int) -> dict[str, Any]:
    """Return medians over repeats that alternate between the two journals."""
    kinds: dict[str, Callable[[Path], Journal]] = {
        "without": lambda folder: NoJournal(JournalConfig(folder=folder), KINDS),
        "with": lambda folder: SqlJournal(JournalConfig(folder=folder, url=url), KINDS),
    }
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _ in range(repeats):
        for kind, make in kinds.items():
            scratch = Path(tempfile.mkdtemp(prefix="durability-", dir=Path.cwd()))
            try:
                found[kind].append(await measure(make, scratch, load))
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    medians = {
        kind: {k: statistics.median(run[k] for run in runs) for k in runs[0]}
        for kind, runs in found.items()
    }
    rows = {f"{k}_{kind}": round(v, 2) for kind, row in medians.items() for k, v in row.items()}
    return rows | {
        "added_ms_p50": round(
            medians["with"]["submit_ms_p50"] - medians["without"]["submit_ms_p50"], 2
        )
    }


def snapshots() -> dict[str, Any]:
    """Return milliseconds and bytes of a snapshot of the tiny model.

    The copy blocks training, and the write does not.
    """
    from skyrl_actors.journal.snapshots import SnapshotFolders
    from skyrl_actors.messages.model import AdamParams
    from skyrl_actors.workers.interface import PartCall, WorkerSpec
    from skyrl_actors.workers.torch_worker import TorchWorker

    worker = TorchWorker(
        WorkerSpec(
            role="policy",
            rank=0,
            world_size=1,
            base_folder=str(base_folder()),
            dtype="float32",
            device="cpu",
            num_threads=1,
            microbatch_tokens=4096,
            collective_timeout_s=60.0,
        )
    )
    worker.setup("127.0.0.1", 0)
    tokens = np.arange(64, dtype=np.int32)
    columns = Columns(
        tokens=tokens,
        offsets=np.array([0, 64]),
        fields={"target_tokens": tokens, "weights": np.ones(64, np.float32)},
    )
    found: dict[str, Any] = {}
    for kind, lora in (("lora_rank_32", LoraSpec(rank=32)), ("full_fine_tune", None)):
        worker.create_model(ModelSpec(model_id="m", base_model="tiny", lora=lora))
        part = PartCall(
            model_id="m", rows=(0,), columns=columns, loss=LossCall("cross_entropy", {})
        )
        worker.forward_backward((part,), False)
        worker.optim_step("m", AdamParams())
        copies, writes, size = [], [], 0
        for number in range(9):
            root = Path(tempfile.mkdtemp(prefix="durability-", dir=Path.cwd()))
            folders = SnapshotFolders(root)
            started = time.perf_counter()
            handle = worker.copy_state("m")
            copied = time.perf_counter()
            staging = folders.stage("m", number)
            worker.write_state(handle, str(staging))
            size = folders.seal(staging, "m", number, 1).num_bytes
            copies.append(1e3 * (copied - started))
            writes.append(1e3 * (time.perf_counter() - copied))
            shutil.rmtree(root)
        found[kind] = {
            "copy_ms": round(statistics.median(copies), 2),
            "write_ms": round(statistics.median(writes), 1),
            "bytes": size,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--url",
        help="an empty PostgreSQL database instead of SQLite, with only one repeat",
    )
    options = parser.parse_args()
    repeats = 1 if options.url else 3
    for load in LOADS:
        emit(
            "durability",
            {
                **{k: v for k, v in asdict(load).items() if v},
                "operations": OPERATIONS,
                "database": "postgresql" if options.url else "sqlite",
                **asyncio.run(compared(load, options.url, repeats)),
            },
        )
        if options.url:
            return
    emit("snapshot", snapshots())


if __name__ == "__main__":
    main()
