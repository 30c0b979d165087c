"""Which engine takes a sample (pure).

Samples that share a beginning go to the same engine, whose cache has it, as long as that engine is not much busier than the
others: rendezvous hashing (Thaler and Ravishankar, 1998) with a bound on the load (Mirrokni et al., 2018, arXiv:1608.01350). When an
engine comes or goes, only its own keys move.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

PREFIX_TOKENS = 64  # of a prompt, by which samples count as alike
BOUND = 1.25  # times the mean load


@dataclass(frozen=True, slots=True)
class EngineLoad:
    name: str
    in_flight: int
    waiting: int
    holds_version: bool  # the full weights the sample needs are loaded
    holds_adapter: bool = True  # and its adapter is there, if it has one

    @property
    def busy(self) -> int:
        return self.in_flight + self.waiting


def affinity_key(version: str, prompt: Sequence[int]) -> bytes:
    return f"{version}:{list(prompt[:PREFIX_TOKENS])}".encode()


def choose(loads: Sequence[EngineLoad], key: bytes) -> int:
    """Of the engines that hold the weights, or all if none does: the key's own one, or the next in the key's order that is within
    the bound. One that has the adapter is taken before one that must load it, if both are within the bound."""
    able = [i for i, load in enumerate(loads) if load.holds_version] or list(range(len(loads)))
    limit = math.ceil(BOUND * (sum(loads[i].busy for i in able) + 1) / len(able))
    order = sorted(able, key=lambda i: blake2b(key + loads[i].name.encode(), digest_size=8).digest())
    free = [i for i in order if loads[i].busy < limit]
    resident = [i for i in free if loads[i].holds_adapter]
    return (resident or free)[0]
