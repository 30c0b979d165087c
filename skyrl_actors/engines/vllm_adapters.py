"""The LoRA adapters of one vLLM engine.

vLLM drops the least recently used adapter when its memory is full, and reads its files again in the
middle of a step, where a missing file ends its process. So adapters are dropped here before its
memory is full, and none that a sample uses. Every read is checked, and an error is of one sample.
"""

import asyncio
import logging
from collections.abc import Mapping
from itertools import count

from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from skyrl_actors.engines.adapter_files import check_adapter
from skyrl_actors.engines.deadlines import PausableDeadlines
from skyrl_actors.engines.engine_args import most_adapters
from skyrl_actors.engines.interface import EngineSpec
from skyrl_actors.engines.resident_adapters import ResidentAdapters
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.weights import WeightManifest

log = logging.getLogger(__name__)
ZEROS = WeightManifest(version="zeros", kind="lora", path="zeros", num_bytes=0)  # for the proof


class VllmAdapters:
    """Adapters by version. `dead` is set when vLLM must be restarted."""

    def __init__(
        self,
        spec: EngineSpec,
        base_shapes: Mapping[str, tuple[int, ...]],
        dead: asyncio.Event,
        deadlines: PausableDeadlines,
    ):
        self._spec = spec
        self._base_shapes = base_shapes
        self._dead = dead
        self._numbers = count(1)  # vLLM's ids, which are never used again
        self.resident: ResidentAdapters[int] = ResidentAdapters(most_adapters(spec), deadlines)

    async def check(self, manifest: WeightManifest) -> None:
        """Check the files of an adapter that is not loaded. Raises InvalidRequest."""
        await self.resident.read(
            manifest.version, lambda: asyncio.to_thread(check_adapter, manifest, self._base_shapes)
        )

    async def taken(self, llm: AsyncLLM, manifest: WeightManifest) -> LoRARequest | None:
        """Load a checked adapter if necessary, and count a user of it until `release`.

        Returns None if it must wait for the samples of other adapters; then wait for `changed`. One
        call at a time. Raises InvalidRequest if vLLM cannot load it.
        """
        version = manifest.version
        if (number := self.resident.use(version)) is None:
            if version in self.resident.versions:
                return None
            try:
                while (old := self.resident.to_drop()) is not None:
                    await self.drop(llm, old)
            except LookupError:
                return None
            await self._load(llm, manifest)
            number = self.resident.take(version)
        return LoRARequest(version, number, manifest.path)

    async def _load(self, llm: AsyncLLM, manifest: WeightManifest) -> None:
        """Load an adapter. vLLM does so too if the caller is cancelled, which then waits for it."""
        loading = asyncio.ensure_future(self._loaded(llm, manifest))
        try:
            await asyncio.shield(loading)
        finally:
            await asyncio.wait((loading,))
            if not loading.cancelled() and loading.exception() is None:
                self.resident.add(manifest.version, loading.result())

    async def _loaded(self, llm: AsyncLLM, manifest: WeightManifest) -> int:
        number = next(self._numbers)
        try:
            await llm.add_lora(LoRARequest(manifest.version, number, manifest.path))
        except EngineDeadError:
            raise
        except Exception as error:  # vLLM raises its worker's error as a plain Exception
            if self._spec.topology.num_devices > 1:
                # The other workers' answers stay in their queues; the next call would get them.
                self._dead.set()
            log.warning("adapter %s of %s: %s", manifest.version, manifest.path, error)
            raise InvalidRequest(
                f"adapter {manifest.version} cannot be loaded: {str(error).splitlines()[0]}"
            ) from error
        return number

    def release(self, manifest: WeightManifest | None) -> None:
        if manifest is not None:
            self.resident.release(manifest.version)

    async def add_zeros(self, llm: AsyncLLM) -> None:
        """Load an adapter that changes nothing, for the proof at the start."""
        number = next(self._numbers)
        await llm.collective_rpc("skyrl_add_zeros", args=(ZEROS.version, number))
        self.resident.add(ZEROS.version, number)

    async def drop(self, llm: AsyncLLM, version: str) -> None:
        if (number := self.resident.pop(version)) is not None:
            await llm.remove_lora(number)
