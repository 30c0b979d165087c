"""The processes of `bench.scale`: a controller over real RPC, and an engine that answers at once.

Only Ray, HTTP and the models are missing. So the CPU time of the controller's process is its cost.
"""

import asyncio
import multiprocessing as mp
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from bench.stub_engine import StubEngine, nothing
from skyrl_actors import heap
from skyrl_actors.colocation.in_flight import in_sample_phase
from skyrl_actors.colocation.phase_lock import ColocatedPhaseLock
from skyrl_actors.colocation.phases import Phase
from skyrl_actors.config.cluster import (
    ClusterConfig,
    EngineConfig,
    JournalConfig,
    LimitsConfig,
    LoraConfig,
)
from skyrl_actors.controller.bounds import RESULT_MEMORY_BYTES
from skyrl_actors.controller.calls import ControllerCalls
from skyrl_actors.controller.controller import Controller
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.engines.interface import EngineCalls
from skyrl_actors.engines.logprob_check import LogprobCheck
from skyrl_actors.engines.pool import EnginePool
from skyrl_actors.journal.build import build_journal
from skyrl_actors.messages.images import Picture
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import SampleOutput, Sequence
from skyrl_actors.messages.weights import SamplerWeights, WeightManifest
from skyrl_actors.transport.rpc import Address, RpcClient
from skyrl_actors.transport.rpc_server import LOOPBACK, RpcServer, to_one
from tests.api.local import MODEL, AnsweringBackend
from tests.fakes import changed

STARTED_S = 60.0
LONGEST = 2**16


class AnsweringEngine:
    """An engine that answers at once with as many tokens as it may."""

    async def sample(
        self,
        epoch: int,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        adapter: WeightManifest | None,
        version: str,
        pictures: tuple[Picture, ...] = (),
    ) -> SampleOutput:
        one = Sequence(
            tokens=np.full(params.max_tokens, 7, np.int32),
            logprobs=np.full(params.max_tokens, -1.0, np.float32),
            stop_reason="length",
        )
        return SampleOutput(sequences=(one,) * params.num_samples, version=version)


class OverRpc(StubEngine):
    """An engine of the pool in another process, without Ray."""

    def __init__(self, name: str, address: Address):
        super().__init__(name)

        async def find() -> Address:
            return address

        self._rpc = RpcClient(find, EngineCalls)

    async def ask(self, method: Any, *arguments: Any, **named: Any) -> Any:
        return await self._rpc.call(getattr(EngineCalls, method.__name__), 1, *arguments, **named)


class OneDevice:
    """Memory that moves at once."""

    async def move(self, *_: Any) -> None: ...


class PooledBackend(AnsweringBackend):
    """Trains at once, and samples in the pool's engines."""

    def __init__(self, folder: str, engines: list[Address]):
        super().__init__(folder)
        config = ClusterConfig()
        check = LogprobCheck(config.logprob_check, 1e-4, "float32", print)
        self._pool = EnginePool(EngineConfig(), Path(folder), nothing, check)
        self._pool.engines = [OverRpc(f"engine:{n}", a) for n, a in enumerate(engines)]
        self._phases = ColocatedPhaseLock(OneDevice(), Phase.SAMPLE, 60.0)  # type: ignore[arg-type]

    async def start(self, epoch: int) -> Any:
        longest = {"max_context_tokens": LONGEST, "max_sample_tokens": LONGEST}
        return changed(await super().start(epoch), **longest)

    async def sample(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        weights: SamplerWeights,
        pictures: tuple[Picture, ...] = (),
    ) -> SampleOutput:
        with self._pool.versions.using(weights):
            await self._pool.any_healthy(weights, params)
            return await in_sample_phase(
                self._phases,
                "drain",
                1.0,
                lambda: self._pool.sample(f"{request_id}.0", prompt, params, weights),
            )


def _engine(pipe: Any) -> None:
    async def serve() -> None:
        server = RpcServer(to_one(AnsweringEngine()), EngineCalls)
        pipe.send(await server.address(LOOPBACK))
        await asyncio.to_thread(pipe.poll, None)

    uvloop.run(serve())


def config_in(folder: Path) -> ClusterConfig:
    return ClusterConfig(
        checkpoint_dir=folder / "checkpoints",
        journal=JournalConfig(folder=folder / "journal"),
        lora=LoraConfig(max_adapters=4096),
        limits=LimitsConfig(models_per_key=4096, samples_in_flight=4096),
    )


class _Process:
    """What the actor of a controller serves by itself."""

    async def fault(self) -> None:
        return None


def _controller(folder: Path, engines: list[Address], pipe: Any) -> None:
    async def serve() -> None:
        config = config_in(folder)
        backend = PooledBackend(str(folder), engines)
        controller = Controller(config, backend, build_journal(config.journal, KINDS))
        await controller.start()
        process = _Process()
        heap.keep_present_objects()  # as the actor does

        async def route(method: str) -> object:
            return process if method == "fault" else controller.part_for(method)

        server = RpcServer(route, ControllerCalls, unsent_bytes=RESULT_MEMORY_BYTES)
        pipe.send(await server.address(LOOPBACK))
        profile = _Profile(os.environ.get("SCALE_PROFILE"))
        while (asked := await asyncio.to_thread(_received, pipe)) is not None:
            profile.turn(asked)
            pipe.send((time.process_time(), time.thread_time()))
        await controller.close()

    uvloop.run(serve())  # as Ray runs actors


class _Profile:
    """Profiles the event loop's thread between two questions, if a file is named."""

    def __init__(self, path: str | None):
        self._path = path

    def turn(self, asked: str) -> None:
        if self._path is None:
            return
        import cProfile

        if asked == "begin":
            self._running = cProfile.Profile(time.thread_time)
            self._running.enable()
        else:
            self._running.disable()
            self._running.dump_stats(self._path)


def _received(pipe: Any) -> Any:
    with suppress(EOFError):
        return pipe.recv()
    return None


class Part:
    """A process of the benchmark, and the address that it serves."""

    def __init__(self, target: Any, *arguments: Any):
        spawning = mp.get_context("spawn")
        self._pipe, theirs = spawning.Pipe()
        self._process = spawning.Process(target=target, args=(*arguments, theirs), daemon=True)
        self._process.start()
        theirs.close()
        if not self._pipe.poll(STARTED_S):
            raise RuntimeError(f"{target.__name__} did not start within {STARTED_S:g} s")
        self.address: Address = self._pipe.recv()

    def cpu_s(self, asked: str) -> tuple[float, float]:
        """Return CPU seconds of all threads, and of the event loop's thread alone."""
        self._pipe.send(asked)
        return self._pipe.recv()

    def end(self) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()


def engine() -> Part:
    return Part(_engine)


def controller(folder: Path, engines: list[Address]) -> Part:
    return Part(_controller, folder, engines)


__all__ = ["MODEL", "Part", "controller", "engine"]
