"""The Ray actor around one engine, and what it serves.

vLLM or JAX is imported in the actor's own process, when the actor is created.

Calls carry the epoch of their controller. When a newer controller takes over, the actor aborts the
older one's samples and waits for its other calls. The newer controller repeats those samples with
the same seed.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any, Literal, TypeVar

from skyrl_actors.engines.interface import (
    CHECK,
    EngineCalls,
    EngineReport,
    EngineSpec,
    EngineStatus,
)
from skyrl_actors.engines.last_exception import own_last_exception
from skyrl_actors.engines.received_files import Files
from skyrl_actors.messages.errors import ConfigError, InternalError, StateLost
from skyrl_actors.messages.images import Picture
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import PartialSample, SampleOutput
from skyrl_actors.messages.weights import WeightManifest, WeightStream
from skyrl_actors.observe import devices
from skyrl_actors.observe.log import named
from skyrl_actors.observe.process import observed
from skyrl_actors.observe.spans import SPANS
from skyrl_actors.transport.rpc import Address
from skyrl_actors.transport.rpc_server import RpcServer, to_one

T = TypeVar("T")


def engine_of(spec: EngineSpec) -> Any:
    """Return the engine of a spec. Only its own library is imported."""
    if spec.type == "jax":
        from skyrl_actors.engines.jax_engine import JaxEngine

        return JaxEngine(spec)
    from skyrl_actors.engines.vllm_engine import VllmEngine

    return VllmEngine(spec)


class EngineServer:
    """Serve one engine to controllers and refuse calls of earlier epochs."""

    def __init__(self, engine: Any):
        self.engine = engine
        self._started = False
        self._log_file = os.path.realpath("/proc/self/fd/2")
        self._epoch = 0
        self._samples: set[asyncio.Task[SampleOutput]] = set()
        self._changes = asyncio.Lock()
        self._superseded = asyncio.Event()
        self._rpc = RpcServer(
            to_one(self), EngineCalls, abandoned=(EngineCalls.sample, EngineCalls.partial)
        )

    def __repr__(self) -> str:
        """Name the actor in Ray's dashboard and in front of its log lines."""
        return self.engine.spec.name

    async def adopt(self, epoch: int) -> EngineReport:
        """Serve only this epoch from now on. Calls of earlier epochs have ended on return."""
        self._fence(epoch)
        self._epoch = epoch
        self._superseded.set()
        self._superseded = asyncio.Event()
        for task in list(self._samples):
            task.cancel()
        await asyncio.gather(*self._samples, return_exceptions=True)
        async with self._changes:
            ready = self._started and not self.engine.dead.is_set()
            status = await self.engine.status() if ready else None
        return EngineReport(
            spec=self.engine.spec, ready=ready, status=status, log_file=self._log_file
        )

    async def get_rpc_address(self, epoch: int, caller: str) -> Address:
        """Return the address at which a process on the caller's machine requests samples."""
        self._fence(epoch)
        return await self._rpc.address_for(caller)

    async def watch(self) -> None:
        """Raise StateLost when the engine has ended; the actor's death raises too.

        Return when the engine is adopted again, because its new controller watches it.
        """
        events = (self.engine.dead, self._superseded)
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not self.engine.dead.is_set():
            return
        cause = await asyncio.to_thread(own_last_exception)
        what = "vLLM's process ended" if self.engine.spec.type == "vllm" else "JAX failed"
        raise StateLost(f"{what}: {cause}".removesuffix(": "))

    async def start(self, epoch: int) -> None:
        await self._change(epoch, self.engine.start())
        self._started = True

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
        self._fence(epoch)
        asked = request_id.removesuffix(CHECK).rpartition(".")[0]  # the suffix numbers the attempt
        named(asked, version)
        task = asyncio.ensure_future(
            self.engine.sample(request_id, prompt, params, adapter, version, pictures)
        )
        self._samples.add(task)
        task.add_done_callback(self._samples.discard)
        with SPANS.sent(
            f"{self!r} sample", repr(self), asked, version=version, prompt_tokens=len(prompt)
        ):
            return await self._lost_if_dead(task)

    async def partial(
        self, epoch: int, request_id: str, have: int, timeout_s: float
    ) -> PartialSample:
        self._fence(epoch)
        return await self.engine.partials.after(request_id, have, timeout_s)

    async def load_full(
        self,
        epoch: int,
        version: str,
        parts: tuple[WeightManifest, ...],
        streams: tuple[WeightStream | None, ...] = (),
    ) -> float:
        return await self._change(epoch, self.engine.load_full(version, parts, streams))

    async def receive(self, path: str, files: Files) -> None:
        await self.engine.receive(path, files)

    async def reads(self, path: str, content: str) -> bool:
        """Return whether the file at `path` exists on this host and contains exactly `content`."""
        return await self.engine.reads(path, content)

    async def discard(self, path: str) -> None:
        await self.engine.discard(path)

    async def drop_adapters(self, epoch: int, versions: tuple[str, ...]) -> None:
        await self._change(epoch, self.engine.drop_adapters(versions))

    async def sleep(self, epoch: int, level: int) -> int:
        return await self._change(epoch, self.engine.sleep(level))

    async def release_kv(self, epoch: int, weights_stay: bool) -> int:
        return await self._change(epoch, self.engine.release_kv(weights_stay))

    async def wake(self, epoch: int, tag: Literal["weights", "kv_cache"]) -> int:
        return await self._change(epoch, self.engine.wake(tag))

    async def status(self) -> EngineStatus:
        spec: EngineSpec = self.engine.spec
        ids = spec.device_ids or devices.visible_ids(os.environ.get("CUDA_VISIBLE_DEVICES"))
        status = await self.engine.status()
        return replace(status, devices=await asyncio.to_thread(devices.read, ids))

    async def stop(self) -> None:
        await self._rpc.close()
        await self.engine.stop()

    async def _change(self, epoch: int, work: Awaitable[T]) -> T:
        async with self._changes:
            self._fence(epoch, work)
            return await self._lost_if_dead(work)

    async def _lost_if_dead(self, work: Awaitable[T]) -> T:
        """Raise StateLost for any failure after vLLM's process ended; another engine can retry."""
        try:
            return await work
        except ConfigError:
            raise  # no engine can start with this model
        except Exception as error:
            if self.engine.died_of(error):
                raise StateLost(
                    f"{self.engine.spec.name}: {await self.engine.why(error)}"
                ) from None
            raise

    def _fence(self, epoch: int, work: Awaitable[Any] | None = None) -> None:
        if epoch < self._epoch:
            if asyncio.iscoroutine(work):
                work.close()
            raise InternalError(
                f"epoch {epoch} is over: a newer controller ({self._epoch}) has taken this engine"
            )


class EngineActor(EngineServer):
    """An engine in a process of its own."""

    def __init__(self, spec: EngineSpec):
        observed().begin(spec.name, logging.WARNING)
        super().__init__(engine_of(spec))

    async def stop(self) -> None:
        await super().stop()
        await asyncio.to_thread(SPANS.close)
