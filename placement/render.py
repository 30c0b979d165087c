"""A plan as a text table."""

from placement.types import Plan

SHOWN_SLOTS = 64


def render(plan: Plan) -> str:
    """Return a table of the first `SHOWN_SLOTS` slots, and the free devices of each node."""
    width = max(len(slot.node) for slot in plan.slots)
    lines = [f"{'slot':>4}  {'node':<{width}}  {'device':<6}  actors"]
    for slot in plan.slots[:SHOWN_SLOTS]:
        actors = ", ".join(
            f"{_name(plan, kind, rank)} {share:g}" for kind, rank, share in slot.holds
        )
        device = "GPU" if "GPU" in slot.resources else "CPU"
        lines.append(f"{slot.index:>4}  {slot.node:<{width}}  {device:<6}  {actors}")
    if len(plan.slots) > SHOWN_SLOTS:
        lines.append(f"   … and {len(plan.slots) - SHOWN_SLOTS} more")
    free = ", ".join(f"{name}: {left:g}" for name, left in plan.free.items())
    return "\n".join([*lines, f"free {plan.device} slots: {free}"])


def _name(plan: Plan, kind: str, rank: int) -> str:
    """Return the name of an actor, or of its device: engine[1].0 is engine 1's first device."""
    width = plan.widths.get(kind, 1)
    return f"{kind}[{rank}]" if width == 1 else f"{kind}[{rank // width}].{rank % width}"
