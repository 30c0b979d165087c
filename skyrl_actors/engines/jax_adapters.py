"""The LoRA adapters of one JAX engine, which are kept in host memory."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from skyrl_actors.engines.adapter_files import check_adapter
from skyrl_actors.engines.deadlines import PausableDeadlines
from skyrl_actors.engines.interface import EngineSpec
from skyrl_actors.engines.resident_adapters import ResidentAdapters
from skyrl_actors.jax_workers.draws import LoadedAdapter
from skyrl_actors.jax_workers.loading import read_adapter
from skyrl_actors.messages.weights import WeightManifest


class JaxAdapters:
    """At most `spec.max_adapters`. `forget` frees the arrays of one that is dropped."""

    def __init__(
        self,
        spec: EngineSpec,
        base_shapes: Mapping[str, tuple[int, ...]],
        forget: Callable[[LoadedAdapter], Awaitable[None]],
        deadlines: PausableDeadlines,
    ):
        self._spec = spec
        self._base_shapes = base_shapes
        self._forget = forget
        self.resident: ResidentAdapters[LoadedAdapter] = ResidentAdapters(
            spec.max_adapters, deadlines
        )

    async def read(self, network: Any, manifest: WeightManifest) -> LoadedAdapter | None:
        """Check and read the files, unless the adapter is held. Raises InvalidRequest."""

        async def read() -> LoadedAdapter:
            await asyncio.to_thread(check_adapter, manifest, self._base_shapes)
            return await asyncio.to_thread(
                read_adapter, network, Path(manifest.path), self._spec.expert_layout
            )

        return await self.resident.read(manifest.version, read)

    async def taken(
        self, manifest: WeightManifest, found: LoadedAdapter | None
    ) -> LoadedAdapter | None:
        """Return the adapter and count a user of it until `release`. One call at a time.

        Returns None if it must wait for the samples of others; then wait for `changed`.
        """
        held = self.resident.use(manifest.version)
        if held is not None or found is None or manifest.version in self.resident.versions:
            return held
        try:
            while (old := self.resident.to_drop()) is not None:
                await self.drop(old)
        except LookupError:
            return None
        self.resident.add(manifest.version, found)
        return self.resident.take(manifest.version)

    async def changed(
        self, seeker: object, manifest: WeightManifest, found: LoadedAdapter | None
    ) -> None:
        """Wait for room, unless the adapter was dropped after it was found to be held."""
        if found is not None or manifest.version in self.resident.versions:
            await self.resident.changed(seeker, manifest.version)

    def release(self, manifest: WeightManifest | None) -> None:
        if manifest is not None:
            self.resident.release(manifest.version)

    async def drop(self, version: str) -> None:
        if (held := self.resident.pop(version)) is not None:
            await self._forget(held)
