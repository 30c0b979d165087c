"""Choose the engine for a sample (pure).

Samples with a common prefix go to the same engine, whose cache holds it. A load bound limits this:
that engine must not be much busier than the others. The method is rendezvous hashing (Thaler and
Ravishankar, 1998) with bounded loads (Mirrokni et al., 2018, arXiv:1608.01350). When an engine
comes or goes, only its own keys move.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

PREFIX_TOKENS = 64  # samples with this many equal first prompt tokens share a key
BOUND = 1.25  # times the mean load


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
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
    limit = math.ceil(BOUND * (sum(loads[i].busy for i in able) + 1) / len(able))
    order = sorted(
        able, key=lambda i: blake2b(key + loads[i].name.encode(), digest_size=8).digest()
    )
    free = [i for i in order if loads[i].busy < limit]
    resident = [i for i in free if loads[i].holds_adapter]
    return (resident or free)[0]
