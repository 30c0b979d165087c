"""Transfer of a sharded full fine-tune to 1, 4 and 8 engines: one stream, and one for each engine.

    python -m bench.transfer_engines

Two FSDP2 ranks hold a float32 model with 100M parameters. gloo broadcasts its weights in buckets.
An engine is simulated by a process that copies what it receives into its own tensors, because more
than one vLLM does not fit on two cores. The result is one JSON line, with medians of ROUNDS rounds:

- gathered: bytes that the ranks gather for the sender, as a multiple of the model's bytes.
- read: bytes that the sender takes for its broadcasts, as a multiple of the model's bytes.
- seconds: from the request until every engine has the weights.
"""

import json
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from skyrl_actors.backends.actor_env import actor_environment
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.transfers import BUCKET_BYTES

ROUNDS, TRAINERS = 3, 2
ENGINES = (1, 4, 8)
WAIT_S = 120.0


def cases() -> list[tuple[int, bool]]:
    """Return (engines, whether they share a stream), in turns."""
    each = [(engines, shared) for engines in ENGINES for shared in (True, False)]
    return each * ROUNDS


def run_rank(rank: int, world: int, port: int, base: str, folder: str) -> list[dict[str, Any]]:
    """Run a trainer (the first ranks) or an engine, and return the trainer's measurements."""
    if rank < TRAINERS:
        return _train(rank, port, base, Path(folder))
    _receive(rank - TRAINERS, Path(folder))
    return []


def _await(file: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not file.exists():
        assert time.monotonic() < deadline, f"{file.name} did not appear"
        time.sleep(0.001)


def _put(file: Path, content: str) -> None:
    partial = file.with_suffix(".partial")
    partial.write_text(content)
    partial.rename(file)


def _receive(engine: int, folder: Path) -> None:
    import torch

    from skyrl_actors.messages.weights import TensorEntry, WeightStream
    from skyrl_actors.transport.streams import received

    device, own = torch.device("cpu"), dict[str, torch.Tensor]()
    for number, (engines, _) in enumerate(cases()):
        if engine >= engines:
            continue
        _await(folder / f"{number}.json")
        opened = json.loads((folder / f"{number}.json").read_text())
        entries = [TensorEntry(**entry) for entry in opened["tensors"]]
        stream = WeightStream(**opened["streams"][engine])
        for name, tensor in received(stream, entries, stream.first_rank, device):
            own.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
        _put(folder / f"{number}-{engine}.done", "")


def _train(rank: int, port: int, base: str, folder: Path) -> list[dict[str, Any]]:
    from skyrl_actors.config.strategies import Fsdp2Strategy
    from skyrl_actors.messages.model import ModelSpec
    from skyrl_actors.messages.weights import WeightManifest
    from skyrl_actors.workers.gather_queue import GatherQueue
    from skyrl_actors.workers.interface import WorkerSpec
    from skyrl_actors.workers.torch_worker import TorchWorker

    worker = TorchWorker(
        WorkerSpec(
            role="policy",
            rank=rank,
            world_size=TRAINERS,
            base_folder=base,
            dtype="float32",
            device="cpu",
            num_threads=1,
            microbatch_tokens=512,
            collective_timeout_s=WAIT_S,
            full_strategy=Fsdp2Strategy(),
        )
    )
    worker.setup("127.0.0.1", port)
    worker.create_model(ModelSpec(model_id="m", base_model="b"))
    manifest = worker.export_weights("m", str(folder / "m"), "m@1", False, "lazy")
    manifest = manifest or WeightManifest(version="m@1", kind="full", path="", num_bytes=0)
    counts, put, take = {"gathered": 0, "read": 0}, GatherQueue.put, GatherQueue.take

    def counted_put(queue: GatherQueue, tensor: Any) -> None:
        counts["gathered"] += tensor.nbytes
        put(queue, tensor)

    def counted_take(queue: GatherQueue, wanted: range) -> Any:
        bucket = take(queue, wanted)
        counts["read"] += bucket.nbytes
        return bucket

    counted: Any = GatherQueue
    counted.put, counted.take = counted_put, counted_take
    found = [_one_case(worker, manifest, folder, number, counts) for number in range(len(cases()))]
    return found if rank == 0 else []


def _one_case(
    worker: Any, manifest: Any, folder: Path, number: int, counts: dict[str, int]
) -> dict[str, Any]:
    from skyrl_actors.messages.weights import WeightStream

    engines, shared = cases()[number]
    before, began = dict(counts), time.perf_counter()
    ids = [f"{number}-{i}" for i in range(1 if shared else engines)]
    if worker.spec.rank == 0:
        asked = WeightStream(
            "", 0, 1 + (engines if shared else 1), "gloo", BUCKET_BYTES["gloo"], WAIT_S
        )
        opened = [worker.open_stream(manifest, replace(asked, id=name)) for name in ids]
        streams = [
            replace(opened[0], first_rank=1 + i) if shared else opened[i] for i in range(engines)
        ]
        tensors = [asdict(entry) for entry in manifest.tensors]
        content = {"streams": [asdict(stream) for stream in streams], "tensors": tensors}
        _put(folder / f"{number}.json", json.dumps(content))
    for name in ids:
        worker.feed("m@1", (name,))
    for engine in range(engines):
        _await(folder / f"{number}-{engine}.done")
    seconds = time.perf_counter() - began
    sizes = {
        name: round((counts[name] - before[name]) / max(1, manifest.num_bytes), 3)
        for name in counts
    }
    return {"engines": engines, "shared": shared, "seconds": round(seconds, 3), **sizes}


def rows(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for engines, shared in cases()[: 2 * len(ENGINES)]:
        own = [one for one in found if (one["engines"], one["shared"]) == (engines, shared)]
        seconds = round(statistics.median(one["seconds"] for one in own), 3)
        made.append({**own[0], "seconds": seconds})
    return made


def main() -> None:
    # must precede the import of torch
    os.environ |= actor_environment(ClusterConfig()) | {"OMP_NUM_THREADS": "1"}
    from bench.harness import emit
    from bench.transfer import make_base
    from tests.workers.ranks import Ranks

    work = Path(tempfile.mkdtemp(prefix="bench-transfer-", dir="/dev/shm"))
    ranks = Ranks(TRAINERS + max(ENGINES), timeout_s=600.0)
    try:
        make_base(work / "base")
        (work / "run").mkdir()
        found = ranks.run(run_rank, str(work / "base"), str(work / "run"))[0]
        emit("transfer_engines", {"rounds": ROUNDS, "rows": rows(found)})
    finally:
        ranks.close()
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
