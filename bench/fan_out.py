"""CPU of the controller for one verb on many ranks, called directly and through relays.

    python -m bench.fan_out

The calls, their encoding and the processes that the controller calls are real. The ranks are
simulated: each of 16 Ray actors answers for its ranks, or for all ranks below a relay, with results
of the real types. A figure is the CPU time of the calling process with all its threads, in
milliseconds a verb, as the median of ROUNDS rounds.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from itertools import cycle
from typing import Any

import numpy as np
import ray

from bench.harness import emit
from skyrl_actors import losses
from skyrl_actors.config.groups import GroupConfig
from skyrl_actors.config.restart import RestartConfig
from skyrl_actors.groups.actor_group import ActorGroup, names_of
from skyrl_actors.groups.fan_out import BRANCHES, Branches, FanOut, RankCall, tree_to
from skyrl_actors.groups.merging import merge_ranks
from skyrl_actors.messages.columns import Columns, columns_from
from skyrl_actors.messages.example import TARGETS, Example
from skyrl_actors.messages.model import AdamParams
from skyrl_actors.messages.precondition import OpPrecondition
from skyrl_actors.workers.interface import BaseModelInfo, RowOutput, TrainWorker

ROUNDS, WARM = 20, 3
SETTLED_S = 20.0  # after the start of the processes
ROWS_EACH, TOKENS_EACH = 2, 256  # of a rank in a forward_backward
SIZES = (8, 64, 256, 1024)
PPO = losses.find("ppo").checked({})


class SimulatedRank:
    """Answer the calls of a rank with results of the real types."""

    def apply(self, epoch: int, model_id: str, *rest: Any) -> dict[str, float]:
        return {"skyrl.ai/grad_norm": 1.0}

    def forward_backward(
        self, epoch: int, data: tuple[Columns, ...], forward_only: bool, parts: Any, rows: Any
    ) -> list[RowOutput]:
        columns, rows = data[0], rows[0]
        tokens = int(columns.lengths[list(rows)].sum())
        numbers = np.zeros(tokens, np.float32)
        sums = {"loss:sum": 1.0, "kl_sample_train_v1:mean": 0.5, "clip_fraction:mean": 0.25}
        output = RowOutput(
            rows=rows, field="logprobs", values=numbers, elementwise=numbers, sums=sums, compute_s=1
        )
        return [output]


class SimulatedRelay:
    """A relay whose ranks are in its own process."""

    def __init__(self) -> None:
        self._rank = SimulatedRank()

    async def relay(self, number: int, call: RankCall) -> list[Any]:
        method = getattr(self._rank, call.method)
        common = [await a if isinstance(a, ray.ObjectRef) else a for a in call.common]
        own = call.own or [()] * len(call.ranks)
        found = [method(*common, *arguments) for arguments in own]
        return merge_ranks(found) if call.merges else found


def batch(ranks: int) -> Columns:
    tokens = np.arange(TOKENS_EACH, dtype=np.int32)
    numbers = np.zeros(TOKENS_EACH, np.float32)
    fields = {TARGETS: tokens, "logprobs": numbers, "advantages": numbers}
    return columns_from([Example(tokens, fields)] * (ROWS_EACH * ranks))


async def cpu_ms(verb: Callable[[], Awaitable[Any]]) -> float:
    found: list[float] = []
    for number in range(WARM + ROUNDS):
        began = time.process_time()
        await verb()
        if number >= WARM:
            found.append(1e3 * (time.process_time() - began))
    return round(statistics.median(found), 2)


async def measured(group: ActorGroup) -> dict[str, float]:
    """Return the CPU milliseconds of a verb without data, and of one with data."""
    group.info = BaseModelInfo(
        num_parameters=1, vocab_size=1, max_context_tokens=1, hidden_size=1024
    )
    now, data = OpPrecondition(1), batch(len(group.actors))
    step = lambda: group.apply("m", now, TrainWorker.optim_step, "m", AdamParams())  # noqa: E731
    compute = lambda: group.forward_backward("m", now, data, PPO, False)  # noqa: E731
    found = {"optim_step_ms": await cpu_ms(step), "forward_backward_ms": await cpu_ms(compute)}
    return {**found, "put_ms": await cpu_ms(lambda: put(data)), "mib": data.nbytes >> 20}


async def put(data: Columns) -> None:
    """Copy the data of a forward_backward into Ray's object store."""
    ray.put((data,))


def group_of(actors: list[Any], branches: Branches) -> ActorGroup:
    fan_out = FanOut(names_of("policy", len(actors)), branches)
    return ActorGroup("policy", GroupConfig(num_ranks=1), actors, 1, RestartConfig(), fan_out)


async def rows() -> list[dict[str, float | str]]:
    make: Any = ray.remote
    direct = [make(num_cpus=0)(SimulatedRank).remote() for _ in range(BRANCHES)]
    relays = [make(num_cpus=0)(SimulatedRelay).remote() for _ in range(BRANCHES)]
    await asyncio.gather(*(actor.__ray_ready__.remote() for actor in (*direct, *relays)))
    await asyncio.sleep(SETTLED_S)
    made: list[dict[str, float | str]] = []
    for ranks in SIZES:
        free = cycle(relays)
        actors = [direct[rank % BRANCHES] for rank in range(ranks)]
        one_level = Branches(actors=actors)
        tree, _ = tree_to(actors, lambda below, rank, free=free: next(free))
        for calls, branches in (("direct", one_level), ("tree", tree)):
            found = await measured(group_of(actors, branches))
            made.append({"ranks": ranks, "calls": calls, "made": len(branches.actors), **found})
            print(made[-1], flush=True)
    return made


def main() -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    emit("fan_out", {"tokens_a_rank": ROWS_EACH * TOKENS_EACH, "rows": asyncio.run(rows())})
    ray.shutdown()


if __name__ == "__main__":
    main()
