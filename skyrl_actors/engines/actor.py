"""The Ray actor around one vLLM engine. It imports vLLM when it is made, in its own process."""

from typing import Literal

from skyrl_actors.engines.interface import EngineSpec, EngineStatus
from skyrl_actors.messages.errors import InternalError
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import SampleOutput
from skyrl_actors.messages.weights import WeightManifest


class EngineActor:
    def __init__(self, spec: EngineSpec):
        from skyrl_actors.engines.vllm_engine import VllmEngine

        self.engine = VllmEngine(spec)

    async def watch(self) -> None:
        """Ends only by an error: the caller learns of the death of this process, or of vLLM's below it."""
        await self.engine.dead.wait()
        raise InternalError("vLLM's process ended")

    async def start(self) -> None:
        await self.engine.start()

    async def sample(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        adapter: WeightManifest | None,
        version: str,
    ) -> SampleOutput:
        return await self.engine.sample(request_id, prompt, params, adapter, version)

    async def load_full(self, version: str, parts: tuple[WeightManifest, ...]) -> float:
        return await self.engine.load_full(version, parts)

    async def receive(self, path: str, files: dict[str, bytes]) -> None:
        await self.engine.receive(path, files)

    async def discard(self, path: str) -> None:
        await self.engine.discard(path)

    async def drop_adapters(self, versions: tuple[str, ...]) -> None:
        await self.engine.drop_adapters(versions)

    async def sleep(self, level: int) -> None:
        await self.engine.sleep(level)

    async def wake(self, tag: Literal["weights", "kv_cache"]) -> None:
        await self.engine.wake(tag)

    async def status(self) -> EngineStatus:
        return await self.engine.status()

    async def stop(self) -> None:
        await self.engine.stop()
