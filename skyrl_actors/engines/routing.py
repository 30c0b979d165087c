"""Choose the engine for a sample (pure).

Samples with a common prefix go to the same engine, whose cache holds it. A load bound limits this:
that engine must not be much busier than the others. The method is rendezvous hashing (Thaler and
Ravishankar, 1998) with bounded loads (Mirrokni et al., 2018, arXiv:1608.01350). When an engine
comes or goes, only its own keys move.
"""

import math
from array import array
from collections.abc import Collection, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

PREFIX_TOKENS = 64  # samples with this many equal first prompt tokens share a key
BOUND = 1.25  # times the mean load
# Odd factors of the 64-bit finalizer of MurmurHash3 (Appleby).
MIX_FIRST, MIX_SECOND = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
HALF = np.uint64(33)


class EngineLoads(NamedTuple):
    """What routing needs to know of the engines, in columns.

    `with_version` and `with_adapter` are the indices of engines that hold the full weights and the
    adapter of the sample.
    """

    names: tuple[str, ...]
    busy: Sequence[int]  # samples that run or wait
    with_version: Sequence[int]
    with_adapter: Collection[int]


class RoutedLock(Protocol):
    """The lock of an engine's full weights."""

    @property
    def state(self) -> str: ...


class Routed(Protocol):
    """An engine, as routing sees it."""

    name: str
    num_samples: int

    @property
    def lock(self) -> RoutedLock: ...

    @property
    def incarnation(self) -> tuple[str, int]: ...


def loads_of(
    engines: Sequence[Routed], version: str, given: Collection[tuple[str, int]]
) -> EngineLoads:
    """Return the loads of engines. `given`: those that have the adapter of the sample."""
    return EngineLoads(
        names=tuple([engine.name for engine in engines]),
        busy=[engine.num_samples for engine in engines],
        with_version=[i for i, engine in enumerate(engines) if engine.lock.state == version],
        with_adapter={i for i, engine in enumerate(engines) if engine.incarnation in given}
        if given
        else (),
    )


def affinity_key(version: str, prompt: Sequence[int]) -> bytes:
    """Return a key that is equal for prompts of one version with the same first tokens."""
    return version.encode() + array("q", prompt[:PREFIX_TOKENS]).tobytes()


def choose(loads: EngineLoads, key: bytes) -> int:
    """Return the index of the engine for this key.

    Candidates are the engines that hold the weights, or all engines if none does. The first one in
    the key's order that is within the load bound wins. Engines with the adapter come before
    engines that must load it, if both are within the bound.
    """
    busy = loads.busy
    able = loads.with_version or range(len(busy))
    if len(able) == 1:
        return able[0]
    every = len(able) == len(busy)
    num_busy = sum(busy if every else [busy[i] for i in able])
    limit = math.ceil(BOUND * (num_busy + 1) / len(able))
    scores = _scores(loads.names, key)
    if loads.with_adapter:
        free = [i for i in able if i in loads.with_adapter and busy[i] < limit]
        if free:
            return min(free, key=scores.__getitem__)
    # An engine is below the limit, which exceeds the mean. The first few decide, as a rule.
    ordered = scores.argsort().tolist()
    return next(i for i in ordered if busy[i] < limit and (every or i in able))


def _scores(names: tuple[str, ...], key: bytes) -> NDArray[np.uint64]:
    """Return a number for each name that only depends on the name and the key."""
    scores = _hashes(names) ^ np.uint64(_hash(key))
    scores = (scores ^ (scores >> HALF)) * MIX_FIRST
    scores = (scores ^ (scores >> HALF)) * MIX_SECOND
    return scores ^ (scores >> HALF)


@lru_cache
def _hashes(names: tuple[str, ...]) -> NDArray[np.uint64]:
    return np.array([_hash(name.encode()) for name in names], np.uint64)


def _hash(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=8).digest())
