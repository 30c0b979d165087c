"""The controller's memory with clients that request large answers and do not read them.

    python -m bench.hostile_memory [--requests 10000] [--readers 100]

A controller with a real journal runs in a separate process and is called over RPC, as by an
ingress. At first its backend answers nothing, so accepted requests of 6 MiB each wait. Then many
connections request large answers and do not read them. All requests are equal, so that the
journal's packs are equal too and need little disk space.
"""

import argparse
import asyncio
import pickle
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.harness import emit
from skyrl_actors.config.base_models import TinyBase
from skyrl_actors.config.cluster import ClusterConfig, JournalConfig
from skyrl_actors.config.limits import LimitsConfig
from skyrl_actors.controller import progress
from skyrl_actors.controller.bounds import PAYLOAD_MEMORY_BYTES, RESULT_MEMORY_BYTES
from skyrl_actors.controller.controller import Controller
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.messages.columns import Columns, offsets_of
from skyrl_actors.messages.example import TARGETS
from skyrl_actors.messages.model import LoraSpec, LossCall, ModelSpec
from skyrl_actors.messages.requests import CreateModel, ForwardBackward, Request
from skyrl_actors.messages.results import LossOutput, Ready, Result, Waiting
from skyrl_actors.transport.protocols import Deferred
from skyrl_actors.transport.rpc import RpcClient
from skyrl_actors.transport.rpc_server import RpcServer, to_one
from tests.api.local import AnsweringBackend

MODEL = "m:train:0"
ROWS, ROW_TOKENS = 128, 4096  # three arrays of 2 MiB: tokens, targets, weights
IN_FLIGHT = 8
WAIT_S = 600.0


class Served:
    """The RPC methods in the controller's process."""

    def __init__(self, controller: Controller, backend: AnsweringBackend):
        self._controller, self._backend = controller, backend

    async def create_session(self, session_id: str) -> str:
        return await self._controller.create_session(session_id)

    async def submit(self, request: Request) -> str:
        return await self._controller.submit(request)

    async def retrieve(self, request_id: str) -> Result | Ready | Waiting:
        return await self._controller.answers.retrieve(request_id, WAIT_S)

    async def fetch(self, request_id: str, num_bytes: int) -> Deferred[Result]:
        return await self._controller.answers.fetch(request_id, num_bytes)

    async def let_go(self, answers: bool) -> None:
        self._backend.go.set() if answers else self._backend.go.clear()


class WideBackend(AnsweringBackend):
    async def start(self, epoch: int) -> Any:
        able = await super().start(epoch)
        return replace(able, max_context_tokens=ROW_TOKENS, max_sample_tokens=ROW_TOKENS)


async def serve(folder: Path, queued_bytes: int) -> None:
    limits = LimitsConfig(queued_bytes=queued_bytes)
    config = ClusterConfig(
        base_model=TinyBase(name="m"),
        limits=limits,
        checkpoint_dir=folder / "checkpoints",
        journal=JournalConfig(
            folder=folder / "journal",
            snapshot_operations=10**6,
            snapshot_s=1e6,
        ),
    )
    backend = WideBackend(str(folder))
    controller = Controller(config, backend, SqlJournal(config.journal, KINDS))
    controller.results.ttl_s = 3600
    progress.SNAPSHOT_BYTES = 2**60
    await controller.start()
    server = RpcServer(
        to_one(Served(controller, backend)), Served, unsent_bytes=RESULT_MEMORY_BYTES
    )
    address = await server.address("127.0.0.1")
    (folder / "address.partial").write_bytes(pickle.dumps(address))
    (folder / "address.partial").rename(folder / "address")
    await asyncio.Event().wait()


def six_mib() -> ForwardBackward:
    tokens = np.ones(ROWS * ROW_TOKENS, np.int32)
    fields: dict[str, Any] = {TARGETS: tokens, "weights": np.ones(len(tokens), np.float32)}
    columns = Columns(tokens=tokens, offsets=offsets_of([ROW_TOKENS] * ROWS), fields=fields)
    return ForwardBackward(model_id=MODEL, columns=columns, loss=LossCall("cross_entropy", {}))


class Watch:
    """The peak resident memory of a process since the last `take`."""

    def __init__(self, process: psutil.Process):
        self._process = process
        self.peak = 0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            self.peak = max(self.peak, self._process.memory_info().rss)
            await asyncio.sleep(0.05)

    def take(self) -> int:
        peak, self.peak = max(self.peak, self._process.memory_info().rss), 0
        return peak


async def measured(
    folder: Path, process: psutil.Process, requests: int, readers: int
) -> dict[str, Any]:
    while not (folder / "address").exists():
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            raise SystemExit("the controller's process died")
        await asyncio.sleep(0.1)
    address = pickle.loads((folder / "address").read_bytes())

    async def find() -> Any:
        return address

    line = RpcClient(find, Served)
    session = await line.call(Served.create_session, "m")
    made = await line.call(
        Served.submit,
        CreateModel(
            spec=ModelSpec(model_id=MODEL, base_model="Qwen/Qwen3-8B", lora=LoraSpec(rank=4)),
            session_id=session,
        ),
    )
    await line.call(Served.retrieve, made)
    watch = Watch(process)
    calm = watch.take()

    await line.call(Served.let_go, False)
    request, ids = six_mib(), list[str]()

    async def submit_some(count: int) -> None:
        for _ in range(count):
            ids.append(await line.call(Served.submit, request))

    await asyncio.gather(*(submit_some(requests // IN_FLIGHT) for _ in range(IN_FLIGHT)))
    queued = watch.take()

    await line.call(Served.let_go, True)
    few = ids[:: max(1, len(ids) // 20)]
    for request_id in [*few, ids[-1]]:  # they run in order, so after the last one all are answered
        ready = await line.call(Served.retrieve, request_id)
        assert isinstance(ready, Ready), ready
        answer = await line.call(Served.fetch, request_id, ready.num_bytes)
        assert isinstance(answer, LossOutput), answer
    answered = watch.take()

    lines = [RpcClient(find, Served) for _ in range(readers)]
    for one in lines:
        (await one.opened()).stream.transport.pause_reading()
    sizes: list[int] = []
    for i in range(10):
        ready = await line.call(Served.retrieve, few[i])
        assert isinstance(ready, Ready), ready
        sizes.append(ready.num_bytes)
    asked = [
        asyncio.create_task(one.call(Served.fetch, few[i], sizes[i]))
        for one in lines
        for i in range(10)
    ]
    await asyncio.sleep(10)
    unread = watch.take()
    async with asyncio.timeout(30):
        await line.call(Served.create_session, "other")
    for task in asked:
        task.cancel()
    mib = 2**20
    return {
        "requests": len(ids),
        "request_mib": round(
            sum(a.nbytes for a in (request.columns.tokens, *request.columns.fields.values())) / mib,
            1,
        ),
        "budget_mib": (PAYLOAD_MEMORY_BYTES + RESULT_MEMORY_BYTES) // mib,
        "calm_rss_mib": calm // mib,
        "queued_rss_mib": queued // mib,
        "answered_rss_mib": answered // mib,
        "readers": readers,
        "unread_rss_mib": unread // mib,
    }


def run(requests: int = 10_000, readers: int = 100) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bench-hostile-", dir="/dev/shm") as scratch:
        command = [
            sys.executable,
            "-m",
            "bench.hostile_memory",
            "--serve",
            scratch,
            "--requests",
            str(requests),
        ]
        process = subprocess.Popen(command)
        try:
            return asyncio.run(
                measured(Path(scratch), psutil.Process(process.pid), requests, readers)
            )
        finally:
            process.kill()
            process.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--readers", type=int, default=100)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        asyncio.run(serve(options.serve, queued_bytes=max(2**36, options.requests * 2**24)))
    else:
        emit("hostile_memory", run(options.requests, options.readers))
