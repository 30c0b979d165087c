"""Phases, the memory that is resident in each, and the moves between them (pure).

Tests prove these rules for all 25 pairs of phases:

* The moves lead to the wanted phase, and no move is useless.
* Memory never exceeds that of the larger phase.
* The optimizer is never resident without weights, nor the KV cache without engine weights.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class MemoryPart(StrEnum):
    """A part of device memory that is loaded and freed as a whole."""

    TRAIN_WEIGHTS = "train weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    ENGINE_WEIGHTS = "engine weights"
    KV_CACHE = "KV cache"


class Phase(StrEnum):
    """A state of the shared devices. `RESIDENT` lists the memory of each phase."""

    IDLE = "IDLE"
    TRAIN = "TRAIN"
    STEP = "STEP"
    SYNC = "SYNC"
    SAMPLE = "SAMPLE"


RESIDENT: dict[Phase, frozenset[MemoryPart]] = {
    Phase.IDLE: frozenset(),
    Phase.TRAIN: frozenset({MemoryPart.TRAIN_WEIGHTS, MemoryPart.GRADIENTS}),
    Phase.STEP: frozenset({MemoryPart.TRAIN_WEIGHTS, MemoryPart.GRADIENTS, MemoryPart.OPTIMIZER}),
    Phase.SYNC: frozenset({MemoryPart.TRAIN_WEIGHTS, MemoryPart.ENGINE_WEIGHTS}),
    Phase.SAMPLE: frozenset({MemoryPart.ENGINE_WEIGHTS, MemoryPart.KV_CACHE}),
}

# Loaded in this order and freed in reverse, so that no part is resident without what it needs.
ORDER = (
    MemoryPart.TRAIN_WEIGHTS,
    MemoryPart.GRADIENTS,
    MemoryPart.OPTIMIZER,
    MemoryPart.ENGINE_WEIGHTS,
    MemoryPart.KV_CACHE,
)


@dataclass(frozen=True, slots=True)
class Move:
    """One part of the memory that is freed from the devices or loaded onto them."""

    action: Literal["free", "load"]
    part: MemoryPart

    def __str__(self) -> str:
        return f"{self.action} {self.part}"


def plan_from(here: frozenset[MemoryPart], wanted: Phase) -> tuple[Move, ...]:
    """Return the moves from the resident parts `here` to a phase; frees come before loads."""
    there = RESIDENT[wanted]
    frees = [Move("free", part) for part in reversed(ORDER) if part in here - there]
    loads = [Move("load", part) for part in ORDER if part in there - here]
    return (*frees, *loads)


def after_move(resident: frozenset[MemoryPart], move: Move) -> frozenset[MemoryPart]:
    """Return what is resident after a move."""
    return resident | {move.part} if move.action == "load" else resident - {move.part}


def serves(current: Phase, wanted: Phase) -> bool:
    """Return whether work of the wanted phase can run in the current one without a move."""
    return RESIDENT[current] >= RESIDENT[wanted] and (current is wanted or wanted is Phase.TRAIN)
