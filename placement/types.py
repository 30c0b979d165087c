"""What is asked for, what there is, and who goes where."""

from collections.abc import Mapping
from dataclasses import dataclass, field


class DoesNotFit(Exception):
    """The demands can not be placed on these nodes; the message has the arithmetic."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Devices for actors of one kind: `count` in all, `width` for each actor, of which `block` neighbours need one node.

    A training group of 8 ranks: count 8. Four engines of tensor parallel 2 over two pipeline stages: count 16, width 4,
    block 2. A helper on a CPU in a cluster of GPUs: device "CPU".
    """

    kind: str  # "policy", "critic", "engine"
    count: int
    share: float = 1.0  # of a slot's device that each actor takes
    width: int = 1
    block: int = 1
    device: str | None = None  # None: the plan's


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    cpus: float
    gpus: float
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    device_bytes: int | None = None  # memory of each of its GPUs
    host_bytes: int | None = None
    ray_id: str = ""


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
    widths: dict[str, int] = field(default_factory=dict[str, int])  # devices of one actor, by kind
    blocks: dict[str, int] = field(default_factory=dict[str, int])

    def slots_of(self, kind: str) -> tuple[Slot, ...]:
        """Slots of all actors of a kind, by rank."""
        found = [(rank, slot) for slot in self.slots for k, rank, _ in slot.holds if k == kind]
        return tuple(slot for _, slot in sorted(found, key=lambda pair: pair[0]))

    def actors_of(self, kind: str) -> tuple[tuple[Slot, ...], ...]:
        """The same, of each actor that takes `width` of them."""
        slots, width = self.slots_of(kind), self.widths.get(kind, 1)
        return tuple(slots[i : i + width] for i in range(0, len(slots), width))
