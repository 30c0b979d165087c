"""Demands, nodes and plans."""

from collections.abc import Mapping
from dataclasses import dataclass, field


class DoesNotFit(Exception):
    """The demands cannot be placed on these nodes. The message contains the arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Devices for actors of one kind.

    `count` is the total number, and `width` the number for each actor. Of these, `block`
    consecutive ones must be on one node. Examples: a training group of 8 ranks has count 8. Four
    engines of tensor parallel 2 over two pipeline stages have count 16, width 4 and block 2. A
    helper on a CPU in a cluster of GPUs has device "CPU".
    """

    kind: str  # "policy", "critic", "engine"
    count: int
    share: float = 1.0  # fraction of a slot's device that each actor takes
    width: int = 1
    block: int = 1
    device: str | None = None  # None: the device of the plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine and its resources. The planner treats all of them as free."""

    name: str
    cpus: float
    gpus: float
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    device_bytes: int | None = None  # memory of each of its GPUs
    host_bytes: int | None = None
    ray_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One placement-group bundle: a GPU with its CPU, or a CPU where there is no GPU."""

    index: int
    node: str
    resources: dict[str, float]
    holds: tuple[tuple[str, int, float], ...]  # (kind, rank, share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The slots and the actors in them."""

    device: str  # "GPU" or "CPU"
    slots: tuple[Slot, ...]
    free: dict[str, float] = field(default_factory=dict[str, float])  # devices left on each node
    widths: dict[str, int] = field(default_factory=dict[str, int])  # devices of one actor, by kind
    blocks: dict[str, int] = field(default_factory=dict[str, int])

    def slots_of(self, kind: str) -> tuple[Slot, ...]:
        """Return the slots of all actors of a kind, ordered by rank."""
        found = [(rank, slot) for slot in self.slots for k, rank, _ in slot.holds if k == kind]
        return tuple(slot for _, slot in sorted(found, key=lambda pair: pair[0]))

    def actors_of(self, kind: str) -> tuple[tuple[Slot, ...], ...]:
        """Return the slots of each actor of a kind. An actor has `width` of them."""
        slots, width = self.slots_of(kind), self.widths.get(kind, 1)
        return tuple(slots[i : i + width] for i in range(0, len(slots), width))
