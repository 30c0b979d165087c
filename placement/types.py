"""What is asked for, what there is, and who goes where."""

from dataclasses import dataclass, field


class DoesNotFit(Exception):
    """The demands can not be placed on these nodes; the message has the arithmetic."""


@dataclass(frozen=True, slots=True)
class Demand:
    """`count` slots for actors of one kind. Demands that name the same `share_with` group sit in the same slots."""

    kind: str  # "policy", "critic", "engine"
    count: int
    share: float = 1.0  # of a slot's device that each actor takes


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True)
class Slot:
    """One placement-group bundle: a GPU with its CPU, or a CPU where there is no GPU."""

    index: int
    node: str
    resources: dict[str, float]
    holds: tuple[tuple[str, int, float], ...]  # (kind, rank, share)


@dataclass(frozen=True, slots=True)
class Plan:
    device: str  # "GPU" or "CPU"
    slots: tuple[Slot, ...]
    free: dict[str, float] = field(default_factory=dict[str, float])  # devices left on each node

    def slots_of(self, kind: str) -> tuple[Slot, ...]:
        """Slots of all actors of a kind, by rank."""
        found = [(rank, slot) for slot in self.slots for k, rank, _ in slot.holds if k == kind]
        return tuple(slot for _, slot in sorted(found, key=lambda pair: pair[0]))
