"""What a service with 1, 2 and 4 controllers can do, computed from the CPU time of each.

    python -m bench.scale_shards

Controllers and engines are processes of their own, which speak the real RPC. Sessions are spread as
ingress processes do it. The CPU time of each controller is measured, and the capacity is what a
core for each would do. First the sessions of one shard after the other work, then all at once. The
second is lower on a machine with fewer cores than processes, whose caches they then share.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import scale_parts
from bench.harness import emit
from bench.scale import Client, Work, forward_backward, sample_of
from bench.scale_parts import MODEL, Part
from skyrl_actors.api.client import ControllerClient
from skyrl_actors.api.sharded_client import ShardedClient
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages.catalog import SessionLabels
from skyrl_actors.messages.model import LoraSpec, ModelSpec
from skyrl_actors.messages.paths import model_id_for, sampler_id_for, shard_of
from skyrl_actors.messages.results import Failure, Ready, Waiting
from skyrl_actors.transport.rpc import Address

SESSIONS, EACH, ROUNDS = 64, 16, 3  # sessions of each shard, operations of each session
WORKS: dict[str, Work] = {
    "sample 256+256": sample_of(256, 256),
    "forward_backward": forward_backward,
}


class ShardAt(ControllerClient):
    """A client of the controller at this address, which needs no Ray."""

    def __init__(self, address: Address):
        super().__init__()
        self._at = address

    async def _address(self) -> Address:
        return self._at


class ShardedSession(Client):
    """A session with a model and a sampler on one of the shards."""

    def __init__(self, client: ControllerClient):
        self._client = client
        self._seq = 0

    async def begin(self) -> None:
        self.session = await self._client.create_session(SessionLabels())
        self.model, self.sampler = model_id_for(self.session, 0), sampler_id_for(self.session, 0)
        spec = ModelSpec(model_id=self.model, base_model=MODEL, lora=LoraSpec(rank=4))
        await self.run(rq.CreateModel(spec=spec, session_id=self.session))
        await self._client.calls.open_sampler(self.sampler, self.session, MODEL, None)

    async def run(self, request: rq.Request) -> None:
        request_id = await self._client.submit(request)
        while isinstance(answer := await self._client.retrieve(request_id, 30.0), Waiting):
            pass
        if isinstance(answer, Ready):
            answer = await self._client.fetch(request_id, answer)
        if isinstance(answer, Failure):
            raise RuntimeError(answer.message)


async def measured(shard: Part, sessions: list[ShardedSession], work: Work) -> float:
    """Return the operations a second that this shard can do with a core of its own."""

    async def worker(session: ShardedSession) -> None:
        for number in range(EACH):
            await work(session, number)

    began = shard.cpu_s("begin")[0]
    async with asyncio.TaskGroup() as running:
        for session in sessions:
            running.create_task(worker(session))
    return len(sessions) * EACH / (shard.cpu_s("end")[0] - began)


async def capacity(shards: list[Part], rounds: int) -> dict[str, dict[str, float]]:
    clients = [ShardAt(shard.address) for shard in shards]
    client = clients[0] if len(clients) == 1 else ShardedClient(clients)
    sessions = [ShardedSession(client) for _ in range(SESSIONS * len(shards))]
    for session in sessions:
        await session.begin()
    theirs = [
        [session for session in sessions if shard_of(session.session) == number]
        for number in range(1, len(shards) + 1)
    ]
    found: dict[str, dict[str, float]] = {}
    for name, work in WORKS.items():
        in_turn: list[float] = []
        at_once: list[float] = []
        for _ in range(1 + rounds):
            runs = [measured(*of, work) for of in zip(shards, theirs, strict=True)]
            in_turn.append(sum([await run for run in runs]))
            runs = [measured(*of, work) for of in zip(shards, theirs, strict=True)]
            at_once.append(sum(await asyncio.gather(*runs)))
        found[name] = {
            "in turn": round(statistics.median(in_turn[1:])),
            "at once": round(statistics.median(at_once[1:])),
        }
    return found


def choice_us(count: int) -> float:
    """Return the microseconds in which the shard of a request is found."""
    from skyrl_actors.api.shard_rules import target_of

    request = rq.Sample(
        sampler_id=f"s{count}-0123456789abcdef:sample:0",
        prompt=(1,),
        params=rq.SamplingParams(max_tokens=1),
    )
    began = time.perf_counter()
    for _ in range(20_000):
        target_of("submit", (request, "r"), {})
    return (time.perf_counter() - began) / 20_000 * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    found: dict[str, Any] = {"choice_us": round(choice_us(2), 2)}
    for count in options.shards:
        with tempfile.TemporaryDirectory(prefix="bench-shards-") as scratch:
            engines = [scale_parts.engine() for _ in range(count)]
            shards = [
                scale_parts.controller(Path(scratch, str(number)), [engine.address])
                for number, engine in enumerate(engines)
            ]
            try:
                found[f"{count} shards"] = asyncio.run(capacity(shards, options.rounds))
            finally:
                for part in (*shards, *engines):
                    part.end()
    emit("scale_shards", found)


if __name__ == "__main__":
    main()
