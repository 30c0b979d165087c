"""Seconds to plan large clusters: policy, critic and engines of tensor parallel 8.

    python -m bench.placement

The layouts are colocated and split. The result is one JSON line with medians for 64, 1024 and 4096
GPUs. A node has eight GPUs, and a rack has sixteen nodes.
"""

import statistics
import time

from bench.harness import emit
from placement.planner import plan
from placement.types import Demand, Node

ROUNDS = 5


def nodes_of(gpus: int) -> list[Node]:
    return [
        Node(name=f"n{i}", cpus=96, gpus=8, labels={"rack": f"r{i // 16}"})
        for i in range(gpus // 8)
    ]


def groups_of(gpus: int, colocated: bool) -> list[list[Demand]]:
    if colocated:
        share = 0.3
        return [
            [
                Demand(kind="policy", count=gpus, share=share),
                Demand(kind="critic", count=gpus, share=share),
                Demand(kind="engine", count=gpus, share=share, width=8, block=8),
            ]
        ]
    return [
        [Demand(kind="policy", count=gpus // 4)],
        [Demand(kind="critic", count=gpus // 4)],
        [Demand(kind="engine", count=gpus // 2, share=1.0, width=8, block=8)],
    ]


def main() -> None:
    found: dict[str, float] = {}
    for gpus in (64, 1024, 4096):
        for colocated in (True, False):
            seconds: list[float] = []
            for _ in range(ROUNDS):
                started = time.perf_counter()
                made = plan(groups_of(gpus, colocated), nodes_of(gpus), "GPU")
                seconds.append(time.perf_counter() - started)
                assert len(made.slots) == gpus
            found[f"{'colocated' if colocated else 'split'}_{gpus}_s"] = round(
                statistics.median(seconds), 4
            )
    emit("placement", found)


if __name__ == "__main__":
    main()
