"""CPU time of a controller for each operation, with few and with many engines.

    python -m bench.scale

Controller, engine and clients are processes of their own, which speak the real RPC. The engine and
the training answer at once. A sample is submitted and its answer retrieved, as an SDK does.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench import scale_parts
from bench.harness import emit
from bench.scale_parts import MODEL, Part
from skyrl_actors.controller.calls import ControllerCalls
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages.catalog import SessionLabels
from skyrl_actors.messages.columns import Columns, offsets_of
from skyrl_actors.messages.example import TARGETS, WEIGHTS
from skyrl_actors.messages.model import AdamParams, LoraSpec, LossCall, ModelSpec
from skyrl_actors.messages.results import Failure, Waiting
from skyrl_actors.transport.rpc import Address, RpcClient

CONCURRENCY, ROUNDS = 256, 5
Work = Callable[["Client", int], Awaitable[None]]


class Client:
    """One session with a model and a sampler of the base model."""

    def __init__(self, address: Address, number: int):
        async def find() -> Address:
            return address

        self._rpc = RpcClient(find, ControllerCalls)
        self.session = f"s{number}"
        self.model = f"s{number}:train:0"
        self.sampler = f"s{number}:sample:0"
        self._seq = 0

    async def begin(self) -> None:
        await self._rpc.call(ControllerCalls.create_session, self.session, SessionLabels())
        spec = ModelSpec(model_id=self.model, base_model=MODEL, lora=LoraSpec(rank=4))
        await self.run(rq.CreateModel(spec=spec, session_id=self.session))
        await self._rpc.call(ControllerCalls.open_sampler, self.sampler, self.session, MODEL, None)

    async def run(self, request: rq.Request) -> None:
        request_id = f"r{self.session}x{self._seq}"
        self._seq += 1
        await self._rpc.call(ControllerCalls.submit, request, request_id)
        while True:
            answer = await self._rpc.call(ControllerCalls.retrieve, request_id, 30.0)
            if isinstance(answer, Failure):
                raise RuntimeError(answer.message)
            if not isinstance(answer, Waiting):
                return

    def next(self) -> int:
        self._seq += 1
        return self._seq


def sample_of(prompt: int, answer: int, num_samples: int = 1) -> Work:
    async def work(client: Client, number: int) -> None:
        params = rq.SamplingParams(max_tokens=answer, seed=number, num_samples=num_samples)
        tokens = tuple((number + i) % 300 for i in range(prompt))
        await client.run(
            rq.Sample(sampler_id=client.sampler, prompt=tokens, params=params, seq_id=client.next())
        )

    return work


async def forward_backward(client: Client, number: int) -> None:
    tokens = np.full(64, number % 300, np.int32)
    fields: dict[str, Any] = {TARGETS: tokens, WEIGHTS: np.ones(64, np.float32)}
    columns = Columns(tokens=tokens, offsets=offsets_of([64]), fields=fields)
    await client.run(
        rq.ForwardBackward(
            model_id=client.model,
            columns=columns,
            loss=LossCall("cross_entropy", {}),
            seq_id=client.next(),
        )
    )


async def optim_step(client: Client, number: int) -> None:
    await client.run(rq.OptimStep(client.model, AdamParams(learning_rate=1e-4), client.next()))


WORKS: dict[str, tuple[Work, int]] = {
    "sample 64+64": (sample_of(64, 64), 2000),
    "sample 256+256": (sample_of(256, 256), 2000),
    "sample 64+4096": (sample_of(64, 4096), 2000),
    # costs are of one request; a group of GRPO is one request
    "16 samples 256+256": (sample_of(256, 256, 16), 500),
    "16 samples 256+4096": (sample_of(256, 4096, 16), 200),
    "forward_backward": (forward_backward, 2000),
    "optim_step": (optim_step, 2000),
}


async def measured(controller: Part, clients: list[Client], work: Work, count: int) -> Any:
    numbers = iter(range(count))

    async def worker(client: Client) -> None:
        for number in numbers:
            await work(client, number)

    began, wall = controller.cpu_s("begin"), time.perf_counter()
    async with asyncio.TaskGroup() as running:
        for client in clients:
            running.create_task(worker(client))
    wall = time.perf_counter() - wall
    ended = controller.cpu_s("end")
    return *(1e3 * (b - a) / count for a, b in zip(began, ended, strict=True)), count / wall


async def costs(controller: Part, rounds: int, only: str | None) -> dict[str, Any]:
    clients = [Client(controller.address, number) for number in range(CONCURRENCY)]
    for client in clients:
        client._rpc = clients[0]._rpc  # one ingress replica has one connection
        await client.begin()
    found: dict[str, Any] = {}
    for name, (work, count) in WORKS.items():
        if only and only not in name:
            continue
        await measured(controller, clients, work, count // 4)
        taken = [await measured(controller, clients, work, count) for _ in range(rounds)]
        names = ("cpu_ms", "loop_ms", "per_s")
        middle = (statistics.median(one) for one in zip(*taken, strict=True))
        found[name] = {n: round(value, 3) for n, value in zip(names, middle, strict=True)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 128])
    parser.add_argument("--only", help="measure only operations with this in their name")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for count in options.engines:
        with tempfile.TemporaryDirectory(prefix="bench-scale-") as scratch:
            engine = scale_parts.engine()
            controller = scale_parts.controller(Path(scratch), [engine.address] * count)
            try:
                measured_now = asyncio.run(costs(controller, options.rounds, options.only))
                found[f"{count} engines"] = measured_now
            finally:
                controller.end()
                engine.end()
    emit("scale", found)


if __name__ == "__main__":
    main()
