"""The worker alone and behind SDK and service, alternately, with the same adapter and data."""

from pathlib import Path
from typing import Any

import tinker
from tinker import types

from bench.harness import service
from bench.train_setup import (
    THREADS,
    columns_of,
    compute,
    ragged,
    rows_of,
    side_by_side,
    tenants,
    tokens_in,
    worker_of,
)
from bench.training import datum


def compare(base: Path, rounds: int) -> dict[str, Any]:
    from bench.train import rates, ratio, same

    worker = worker_of(base)
    (name,) = tenants(worker, 1)
    data = [rows_of(i, ragged(7)) for i in range(rounds + 1)]
    columns = [columns_of(rows) for rows in data]
    options = (
        f"policy.num_threads={THREADS}",
        "critic=null",
        "lora.alpha=16",
        "base_model.type=pretrained",
        "base_model.name=m50",
        f"base_model.path={base}",
    )
    with service(*options) as _, tinker.ServiceClient() as client:
        tenant = client.create_lora_training_client("m50", rank=8, seed=0, train_unembed=False)
        datums = [[datum(row) for row in rows] for rows in data]

        def ours(i: int) -> types.ForwardBackwardOutput:
            return tenant.forward_backward(datums[i], "cross_entropy").result()

        same(ours(0).metrics["loss:sum"], compute(worker, [(name, columns[0])]))
        found = side_by_side(
            {"worker": lambda i: compute(worker, [(name, columns[i])]), "service": ours}, rounds
        )
    return {
        "service_ratio": ratio(found, "service", "worker"),
        "service": rates(found, tokens_in(data[1])),
    }
