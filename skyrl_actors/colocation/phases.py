"""Phases are residencies: what is in device memory, and the moves from one phase to another (pure).

Laws, tested for all 25 pairs: the moves arrive; memory never exceeds the larger end; optimizer never without weights;
KV cache never without engine weights; no useless move.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class Part(StrEnum):
    TRAIN_WEIGHTS = "train weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    ENGINE_WEIGHTS = "engine weights"
    KV_CACHE = "KV cache"


class Phase(StrEnum):
    IDLE = "IDLE"
    TRAIN = "TRAIN"
    STEP = "STEP"
    SYNC = "SYNC"
    SAMPLE = "SAMPLE"


RESIDENT: dict[Phase, frozenset[Part]] = {
    Phase.IDLE: frozenset(),
    Phase.TRAIN: frozenset({Part.TRAIN_WEIGHTS, Part.GRADIENTS}),
    Phase.STEP: frozenset({Part.TRAIN_WEIGHTS, Part.GRADIENTS, Part.OPTIMIZER}),
    Phase.SYNC: frozenset({Part.TRAIN_WEIGHTS, Part.ENGINE_WEIGHTS}),
    Phase.SAMPLE: frozenset({Part.ENGINE_WEIGHTS, Part.KV_CACHE}),
}

# Loaded in this order and freed in the reverse one, so nothing stands without what it needs.
ORDER = (Part.TRAIN_WEIGHTS, Part.GRADIENTS, Part.OPTIMIZER, Part.ENGINE_WEIGHTS, Part.KV_CACHE)


@dataclass(frozen=True, slots=True)
class Move:
    action: Literal["free", "load"]
    part: Part

    def __str__(self) -> str:
        return f"{self.action} {self.part}"


def plan_moves(current: Phase, wanted: Phase) -> tuple[Move, ...]:
    return plan_from(RESIDENT[current], wanted)


def plan_from(here: frozenset[Part], wanted: Phase) -> tuple[Move, ...]:
    """From whatever is resident. Frees before loads."""
    there = RESIDENT[wanted]
    frees = [Move("free", part) for part in reversed(ORDER) if part in here - there]
    loads = [Move("load", part) for part in ORDER if part in there - here]
    return (*frees, *loads)


def after_move(resident: frozenset[Part], move: Move) -> frozenset[Part]:
    """What is resident when a move is done."""
    return resident | {move.part} if move.action == "load" else resident - {move.part}


def serves(current: Phase, wanted: Phase) -> bool:
    """True if work of the wanted phase can run in the current one as it is: all it needs is resident."""
    return RESIDENT[current] >= RESIDENT[wanted] and (current is wanted or wanted is Phase.TRAIN)
