"""Choose the engine for a sample (pure).

Samples with a common prefix go to the same engine, whose cache holds it. A load bound limits this:
that engine must not be much busier than the others. The method is rendezvous hashing (Thaler and
Ravishankar, 1998) with bounded loads (Mirrokni et al., 2018, arXiv:1608.01350). When an engine
comes or goes, only its own keys move.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PREFIX_TOKENS = 64  # samples with this many equal first prompt tokens share a key
BOUND = 1.25  # times the mean load
# Odd factors of the 64-bit finalizer of MurmurHash3 (Appleby).
MIX_FIRST, MIX_SECOND = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
HALF = np.uint64(33)


class EngineLoad(NamedTuple):
    """What routing needs to know of one engine."""

    name: str
    in_flight: int
    waiting: int
    holds_version: bool  # the full weights that the sample needs are loaded
    holds_adapter: bool = True  # the sample's adapter is loaded, or it has none

    @property
    def busy(self) -> int:
        return self.in_flight + self.waiting


def affinity_key(version: str, prompt: Sequence[int]) -> bytes:
    """Return a key that is equal for prompts of one version with the same first tokens."""
    return f"{version}:{list(prompt[:PREFIX_TOKENS])}".encode()


def choose(loads: Sequence[EngineLoad], key: bytes) -> int:
    """Return the index of the engine for this key.

    Candidates are the engines that hold the weights, or all engines if none does. The first one in
    the key's order that is within the load bound wins. Engines with the adapter come before
    engines that must load it, if both are within the bound.
    """
    able = [i for i, load in enumerate(loads) if load.holds_version] or list(range(len(loads)))
    if len(able) == 1:
        return able[0]
    busy = [loads[i].busy for i in able]
    limit = math.ceil(BOUND * (sum(busy) + 1) / len(able))
    free = [i for i, b in zip(able, busy, strict=True) if b < limit]
    candidates = [i for i in free if loads[i].holds_adapter] or free
    order = _scores(tuple([load.name for load in loads]), key)[candidates]
    return candidates[int(order.argmin())]


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
