"""The functions that the ranks of bench.train run."""

from typing import Any

from bench.train_setup import CALL, columns_of, rows_of, side_by_side, tenants
from skyrl_actors.config.strategies import Fsdp2Strategy, ReplicaStrategy
from skyrl_actors.groups.sharding import assign_parts
from skyrl_actors.messages.model import AdamParams
from skyrl_actors.workers.interface import PartCall, WorkerSpec
from skyrl_actors.workers.torch_worker import TorchWorker

LENGTHS = (40, 60, 80)  # lengths for each of four tenants, 720 tokens in total


def time_tenants(
    rank: int, world: int, port: int, base: str, kind: str, rounds: int
) -> dict[str, list[float]]:
    strategy: Any = Fsdp2Strategy() if kind == "fsdp2" else ReplicaStrategy()
    worker = TorchWorker(
        WorkerSpec(
            role="policy",
            rank=rank,
            world_size=world,
            base_folder=base,
            dtype="float32",
            device="cpu",
            num_threads=1,
            microbatch_tokens=4096,
            collective_timeout_s=600.0,
            strategy=strategy,
        )
    )
    worker.setup("127.0.0.1", port)
    parts = [(name, columns_of(rows_of(i, LENGTHS))) for i, name in enumerate(tenants(worker, 4))]

    def run(some: list[Any]) -> None:
        shares = assign_parts([columns.lengths for _, columns in some], world)[rank]
        calls = tuple(
            PartCall(model_id=name, rows=rows, columns=columns, loss=CALL)
            for rows, (name, columns) in zip(shares, some, strict=True)
        )
        worker.forward_backward(calls, False)

    return side_by_side(
        {"together": lambda i: run(parts), "alone": lambda i: [run([part]) for part in parts]},
        rounds,
    )


def time_rows(rank: int, world: int, port: int, base: str, rounds: int) -> list[float]:
    """Measure one adapter with 16 rows of 128 tokens, and the step that sums its gradients."""
    worker = TorchWorker(
        WorkerSpec(
            role="policy",
            rank=rank,
            world_size=world,
            base_folder=base,
            dtype="float32",
            device="cpu",
            num_threads=1,
            microbatch_tokens=1024,
            collective_timeout_s=600.0,
        )
    )
    worker.setup("127.0.0.1", port)
    (name,) = tenants(worker, 1)
    columns = columns_of(rows_of(0, [128] * 16))
    rows = assign_parts([columns.lengths], world)[rank][0]

    def work(number: int) -> None:
        worker.forward_backward(
            (PartCall(model_id=name, rows=rows, columns=columns, loss=CALL),), False
        )
        worker.optim_step(name, AdamParams(learning_rate=1e-4))

    return side_by_side({"all": work}, rounds)["all"]
