"""The versions of weights that engines serve: who uses, holds and checked each of them.

The trainers' side of a version is `workers/versions.py`: a version is live while the weights still
equal it, materialized once its files are written, and dropped with its last sampler.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Generator, Hashable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from skyrl_actors.engines.interface import BASE_VERSION
from skyrl_actors.engines.replica import Incarnation
from skyrl_actors.messages.weights import SamplerWeights, WeightManifest, WeightStream

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(slots=True)
class Version:
    """One version. Tasks are kept by engine and start: a restarted engine has nothing."""

    parts: tuple[WeightManifest, ...] = ()
    uses: int = 0  # running samples
    loaded: bool = False  # an engine holds or held its full weights
    deliveries: dict[Incarnation, asyncio.Task[WeightStream | None]] = field(
        default_factory=dict[Incarnation, asyncio.Task[WeightStream | None]]
    )
    # A finished check means that the engine's logprobs agree with the trainer's.
    checks: dict[Incarnation, asyncio.Task[None]] = field(
        default_factory=dict[Incarnation, asyncio.Task[None]]
    )


class VersionTable:
    """All versions by name. Entries appear on first use and go with `drop`."""

    def __init__(self) -> None:
        self._versions: dict[str, Version] = {}

    def __getitem__(self, version: str) -> Version:
        return self._versions.setdefault(version, Version())

    @contextmanager
    def using(self, weights: SamplerWeights) -> Generator[None]:
        """Count a running sample of this version."""
        version = self[weights.version]
        version.uses += 1
        try:
            yield
        finally:
            version.uses -= 1

    def register(self, weights: SamplerWeights) -> str:
        """Record where a version's files are; return the full version that an engine must hold."""
        wanted = full_version(weights)
        if wanted != BASE_VERSION:
            self[wanted].parts = weights.parts
        return wanted

    def deliveries_of(self, version: str) -> Collection[Incarnation]:
        """Return the engines that have an adapter, or are being given it."""
        found = self._versions.get(version)
        return () if found is None else found.deliveries

    def needless(self, held: Collection[str]) -> tuple[str, ...]:
        """Return full versions that need no copy when their weights change.

        These are the versions that all engines hold, and those that an engine held and no sample
        uses any more. `held`: the versions of the engines.
        """
        return tuple(
            name
            for name, version in self._versions.items()
            if version.loaded and (not version.uses or set(held) == {name})
        )

    def drop(self, version: str) -> None:
        self._versions.pop(version, None)


async def once(
    tasks: dict[K, asyncio.Task[T]],
    key: K,
    work: Callable[[], Coroutine[Any, Any, T]],
) -> T:
    """Await work that runs once for all callers. Work that fails is forgotten."""
    if key not in tasks:
        tasks[key] = asyncio.create_task(work())
        tasks[key].add_done_callback(lambda task: _forget_failed(tasks, key, task))
    return await asyncio.shield(tasks[key])


def _forget_failed(tasks: dict[K, asyncio.Task[T]], key: K, task: asyncio.Task[T]) -> None:
    if task.cancelled() or task.exception() is not None:
        tasks.pop(key, None)


def full_version(weights: SamplerWeights) -> str:
    """Return the full-weight version an engine must hold; an adapter needs the base."""
    return BASE_VERSION if weights.adapter or not weights.parts else weights.version
