"""Nodes whose devices share one memory that does not suffice for all of them (pure)."""

from collections.abc import Mapping, Sequence

from placement.memory import GIB, PHASES, MemoryPlan

Counts = Mapping[str, int]  # of each kind of device, as in `MemoryPlan.parts`


def crowded(plan: MemoryPlan, nodes: Sequence[tuple[int, Counts]]) -> list[str]:
    """Describe each node, given by its bytes and devices, on which several kinds are too large.

    Nothing leaves that memory, so each kind counts with its largest phase.
    """
    most = {device: max(plan.used(device, phase) for phase in PHASES) for device in plan.parts}
    found: list[str] = []
    for own, counts in nodes:
        usable = int(own * (1 - plan.reserve))
        needed = sum(most[kind] * count for kind, count in counts.items())
        if len(counts) > 1 and needed > usable:
            parts = " + ".join(f"{count} x {kind}" for kind, count in counts.items())
            found.append(
                f"{parts} on one node need {needed / GIB:.2f} GiB of {usable / GIB:.2f}, "
                f"{(needed - usable) / GIB:.2f} too much; use more nodes or smaller parts"
            )
    return found
