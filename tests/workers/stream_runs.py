"""Functions of (rank, world_size, port, …) for tests of versions sent from live weights."""

import threading
import time
from pathlib import Path
from typing import Any

import torch

from skyrl_actors.config.strategies import StrategyConfig
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.errors import InternalError, WeightsGone
from skyrl_actors.messages.model import AdamParams, ModelSpec
from skyrl_actors.messages.weights import WeightManifest, WeightStream
from skyrl_actors.transport.streams import received
from skyrl_actors.workers.export import described
from skyrl_actors.workers.torch_worker import TorchWorker
from tests.workers.strategy_runs import gathered, one, worker_of

BUCKET = 20_000  # bytes: a few tensors a bucket; some tensors are larger
LONGEST_S = 120.0


class Receiver(threading.Thread):
    """The receiving end of a stream, as in an engine."""

    def __init__(
        self, worker: TorchWorker, manifest: WeightManifest, stream_id: str, backend: Any = "gloo"
    ):
        super().__init__(daemon=True)
        asked = WeightStream("", 0, 2, backend, BUCKET, LONGEST_S, checksums=True, id=stream_id)
        self.stream = worker.open_stream(manifest, asked)
        self.manifest, self.tensors, self.error = manifest, dict[str, torch.Tensor](), ""
        self.start()

    def run(self) -> None:
        try:
            for name, tensor in received(
                self.stream, list(self.manifest.tensors), 1, torch.device("cpu")
            ):
                self.tensors[name] = tensor.clone()
        except InternalError as error:
            self.error = str(error)

    def equals(self, wanted: dict[str, torch.Tensor]) -> bool:
        """Return whether all has come as it was sent. Raises RuntimeError if it did not come."""
        self.join(LONGEST_S)
        if self.error or self.is_alive():
            raise RuntimeError(self.error or f"nothing came within {LONGEST_S:g} s")
        return list(self.tensors) == list(wanted) and all(
            torch.equal(self.tensors[n], wanted[n]) for n in wanted
        )


def sent_by_every_rank(
    rank: int,
    world: int,
    port: int,
    base: str,
    strategy: StrategyConfig,
    columns: Columns,
    folder: str,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Send a version from each rank to a receiver of its own, and then from the last rank alone."""
    worker, checks = worker_of(rank, world, port, base, strategy, **options), dict[str, Any]()
    worker.create_model(ModelSpec(model_id="m", base_model="tiny"))
    one(worker, "m", columns, "cross_entropy")
    worker.optim_step("m", AdamParams(learning_rate=1e-2))
    worker.export_weights("m", f"{folder}/1", "m@1", False, "lazy")
    dtype: torch.dtype = getattr(torch, worker.spec.export_dtype)
    found = described(worker.models["m"].state.shapes, Path(f"{folder}/1"), "m@1", dtype)
    wanted = [gathered(worker, "m", "weights")]
    torch.distributed.broadcast_object_list(wanted)
    wanted = {name: tensor.to(dtype) for name, tensor in wanted[0].items()}

    ids = tuple(f"stream {number}" for number in range(world))
    receiver = Receiver(worker, found, ids[rank], "ipc")
    worker.feed("m@1", ids, everywhere=True)
    checks["sent by every rank"] = receiver.equals(wanted)
    last = Receiver(worker, found, "last", "ipc") if rank == world - 1 else None
    worker.feed("m@1", ("last",), everywhere=True)
    checks["sent by the last rank"] = last is None or last.equals(wanted)
    nobody = WeightStream("", 0, 2, "ipc", BUCKET, 0.5, id=f"nobody {rank}")
    if rank == 0:
        worker.open_stream(found, nobody)
    receiver = Receiver(worker, found, "one", "ipc") if rank else None
    worker.feed("m@1", ("nobody 0", "one"), everywhere=True)
    checks["a lost engine does not stop another"] = receiver is None or receiver.equals(wanted)
    one(worker, "m", columns, "cross_entropy")
    worker.optim_step("m", AdamParams(learning_rate=1e-2))
    checks["no queue is left"] = not worker.models["m"].versions.feeds
    return checks


def sent_from_the_weights(
    rank: int,
    world: int,
    port: int,
    base: str,
    strategy: StrategyConfig,
    columns: Columns,
    folder: str,
    options: dict[str, Any],
) -> dict[str, Any]:
    worker, checks = worker_of(rank, world, port, base, strategy, **options), dict[str, Any]()
    worker.create_model(ModelSpec(model_id="m", base_model="tiny"))

    def train() -> None:
        one(worker, "m", columns, "cross_entropy")
        worker.optim_step("m", AdamParams(learning_rate=1e-2))

    def save(number: int) -> WeightManifest:
        made = worker.export_weights("m", f"{folder}/{number}", f"m@{number}", True, "lazy")
        return made or WeightManifest(
            version=f"m@{number}", kind="full", path=f"{folder}/{number}", num_bytes=0
        )

    first = rank == 0
    train()
    manifest, wanted = save(1), gathered(worker, "m", "weights")
    checks["nothing is written"] = not Path(manifest.path).exists()
    checks["the version exists"] = worker.exists(manifest.path)
    receivers = []
    for number in range(2):
        receivers += [Receiver(worker, manifest, f"stream {number}")] if first else []
        worker.feed("m@1", (f"stream {number}",))
    checks["sent"] = all(receiver.equals(wanted) for receiver in receivers)

    for number in range(3 if first else 0):
        checks["sent"] &= strategy.type != "replica" or Receiver(
            worker, manifest, f"more {number}"
        ).equals(wanted)
    # The last reader, and one that was ending.
    checks["few readers are kept"] = len(worker.models["m"].versions.readers) <= 2
    checks["written before a step"] = worker.write_versions("m", ()) == ["m@1"]
    train()
    late = Receiver(worker, manifest, "late") if first else None
    worker.feed("m@1", ("late",))  # nothing to gather: the version comes from the file
    checks["sent from the file"] = late is None or late.equals(wanted)
    checks["the file is complete"] = (
        not first or Path(manifest.path).stat().st_size == manifest.num_bytes
    )
    checks["the weights changed"] = not first or not torch.equal(
        next(iter(gathered(worker, "m", "weights").values())), next(iter(wanted.values()))
    )
    if not first:
        gathered(worker, "m", "weights")

    left = save(2)
    checks["left unwritten"] = worker.write_versions("m", ("m@2",)) == []
    if first:
        worker.open_stream(left, WeightStream("", 0, 2, "gloo", BUCKET, 0.5, id="nobody"))
    started = time.monotonic()
    worker.feed("m@2", ("nobody",))
    checks["a stream without a receiver ends"] = time.monotonic() - started < 20
    train()
    checks["gone"] = not worker.exists(left.path)
    if first:
        try:
            worker.open_stream(left, WeightStream("", 0, 2, "gloo", BUCKET, 0.5))
        except WeightsGone as error:
            checks["gone"] = "was not written" in str(error)

    dropped = save(3)
    worker.discard_export(dropped.path)
    checks["dropped"] = not worker.exists(dropped.path) and worker.write_versions("m", ()) == []
    return checks
