"""The Ray actor around one vLLM engine. It imports vLLM when it is made, in its own process.

Calls carry the epoch of their controller. When a newer controller takes the engine over, the samples of the older one
are aborted (they will be asked for again, with the same seed), and its other calls are waited for.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable
from typing import Literal, TypeVar

from skyrl_actors.engines.interface import CHECK, ON_LINE, EngineReport, EngineSpec, EngineStatus
from skyrl_actors.line import Address, LineServer
from skyrl_actors.messages.errors import InternalError, StateLost
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import PartialSample, SampleOutput
from skyrl_actors.messages.weights import WeightManifest, WeightStream
from skyrl_actors.observe.log import named
from skyrl_actors.observe.process import observed
from skyrl_actors.observe.spans import SPANS

T = TypeVar("T")


class EngineActor:
    def __init__(self, spec: EngineSpec):
        from skyrl_actors.engines.vllm_engine import VllmEngine

        observed().begin(spec.name, logging.WARNING)
        self.engine = VllmEngine(spec)
        self._started = False
        self._log_file = os.path.realpath("/proc/self/fd/2")
        self._epoch = 0
        self._samples: set[asyncio.Task] = set()
        self._changes = asyncio.Lock()
        self._line = LineServer(self, ON_LINE, abandoned=ON_LINE)

    def __repr__(self) -> str:
        """In Ray's dashboard and before its lines of the log."""
        return self.engine.spec.name

    async def adopt(self, epoch: int) -> EngineReport:
        """From now on only this epoch's calls are served; what an earlier one began has ended when this returns."""
        self._fence(epoch)
        self._epoch = epoch
        for task in list(self._samples):
            task.cancel()
        await asyncio.gather(*self._samples, return_exceptions=True)
        async with self._changes:
            ready = self._started and not self.engine.dead.is_set()
            status = await self.engine.status() if ready else None
        return EngineReport(self.engine.spec, ready, status, self._log_file)

    async def get_line(self, epoch: int, caller: str) -> Address:
        """Where a process on that machine asks for samples directly."""
        self._fence(epoch)
        return await self._line.address_for(caller)

    async def watch(self) -> None:
        """Ends only by an error: the caller learns of the death of this process, or of vLLM's below it."""
        await self.engine.dead.wait()
        raise StateLost("vLLM's process ended")

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
    ) -> SampleOutput:
        self._fence(epoch)
        asked = request_id.removesuffix(CHECK).rpartition(".")[0]  # behind it stands which attempt this is
        named(asked, version)
        task = asyncio.ensure_future(self.engine.sample(request_id, prompt, params, adapter, version))
        self._samples.add(task)
        task.add_done_callback(self._samples.discard)
        with SPANS.sent(f"{self!r} sample", repr(self), asked, version=version, prompt_tokens=len(prompt)):
            return await self._lost_if_dead(task)

    async def partial(self, epoch: int, request_id: str, have: int, timeout_s: float) -> PartialSample:
        self._fence(epoch)
        return await self.engine.partials.after(request_id, have, timeout_s)

    async def load_full(
        self, epoch: int, version: str, parts: tuple[WeightManifest, ...], streams: tuple[WeightStream | None, ...] = ()
    ) -> float:
        return await self._change(epoch, self.engine.load_full(version, parts, streams))

    async def receive(self, path: str, files: dict[str, bytes]) -> None:
        await self.engine.receive(path, files)

    async def reads(self, path: str, content: str) -> bool:
        """Whether a file says this here."""
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
        return await self.engine.status()

    async def stop(self) -> None:
        await self._line.close()
        await self.engine.stop()
        await asyncio.to_thread(SPANS.close)

    async def _change(self, epoch: int, work: Awaitable[T]) -> T:
        async with self._changes:
            self._fence(epoch, work)
            return await self._lost_if_dead(work)

    async def _lost_if_dead(self, work: Awaitable[T]) -> T:
        """Whatever fails because vLLM's process is gone is lost with it, and may be asked of another engine."""
        try:
            return await work
        except Exception as error:
            if self.engine.died_of(error):
                raise StateLost(f"vLLM's process of {self.engine.spec.name} ended: {error}") from None
            raise

    def _fence(self, epoch: int, work: Awaitable | None = None) -> None:
        if epoch < self._epoch:
            if asyncio.iscoroutine(work):
                work.close()
            raise InternalError(f"epoch {epoch} is over: a newer controller ({self._epoch}) has taken this engine")
