"""Functions of (rank, world_size, port, …) that the ranks of a mesh run."""

from typing import Any

import jax
import numpy as np

from skyrl_actors.config.strategies import JaxStrategy
from skyrl_actors.jax_workers.network import JaxNetwork
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.messages.model import AdamParams, LoraSpec, ModelSpec
from skyrl_actors.workers.interface import WorkerSpec
from tests.workers.references import batch
from tests.workers.strategy_runs import gathered, made_for, one, worker_of

# Of one size, because a mesh on CPUs compiles its programs each time.
ROWS = ((9, 30, 4), (17, 5, 20), (40, 3))
STEP = AdamParams(learning_rate=1e-2, weight_decay=0.1)
NAMES = ("m", "n")


def trained(
    rank: int,
    world: int,
    port: int,
    base: str,
    strategy: JaxStrategy,
    lora: LoraSpec | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Train two models in turn: in each step two calls, and a forward between them."""
    worker = worker_of(rank, world, port, base, strategy, budget=256, **options)
    for name in NAMES:
        worker.create_model(
            ModelSpec(model_id=name, base_model="tiny", lora=lora, seed=len(name), role="policy")
        )
    scored = dict[tuple[int, int], np.ndarray]()
    norms: list[float] = []
    for number in range(4):
        name = NAMES[number % 2]
        for which in (number, number + 4):
            one(worker, name, batch(which, ROWS[which % 3]), "cross_entropy")
            columns = batch(9, ROWS[0])
            found = one(worker, name, columns, "cross_entropy", forward_only=True)
            start = 0
            for row in found.rows:
                length = int(columns.lengths[row])
                scored[number, row] = found.values[start : start + length]
                start += length
        norms.append(worker.optim_step(name, STEP)["skyrl.ai/grad_norm"])
    network = worker.models["m"].network
    assert isinstance(network, JaxNetwork)
    weight = network.base.layers["self_attn.q_proj.weight"]
    return {
        "weights": {n: t.numpy() for n, t in gathered(worker, "m", "weights").items()},
        "scored": scored,
        "norms": norms,
        "share": weight.addressable_data(0).nbytes / weight.nbytes,
        "programs": worker.paths()["programs"],
    }


def prepared(
    rank: int, world: int, port: int, base: str, strategy: JaxStrategy
) -> tuple[int, int, list[float]]:
    """Compile ahead. Return the programs before and after calls, and the norms of the steps."""
    spec = WorkerSpec(
        role="policy",
        rank=rank,
        world_size=world,
        base_folder=base,
        dtype="float32",
        device="cpu",
        num_threads=1,
        microbatch_tokens=64,
        collective_timeout_s=60.0,
        strategy=strategy,
        max_rank=4,
    )
    worker = made_for(spec)
    worker.setup("127.0.0.1", port)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny", lora=LoraSpec(rank=4), seed=1))
    network = worker.model_factory.base
    assert isinstance(network, JaxNetwork)
    before, norms = network.programs.counters.programs, list[float]()
    for number, rows in enumerate(((9,), (30, 20))):
        one(worker, "m", batch(number, rows), "cross_entropy", forward_only=True)
        one(worker, "m", batch(number, rows), "cross_entropy")
        norms.append(worker.optim_step("m", STEP)["skyrl.ai/grad_norm"])
    return before, network.programs.counters.programs, norms


def starts_with_another_version(rank: int, world: int, port: int, base: str) -> str:
    """Return the error of a mesh whose second rank has another version of JAX."""
    if rank == 1:
        jax.__version__ = "0.9.9"
    try:
        worker_of(rank, world, port, base, JaxStrategy(fsdp=2))
    except ConfigError as error:
        return str(error)
    return ""
