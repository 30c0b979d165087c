"""A plan as text for people."""

from placement.types import Plan


def render(plan: Plan) -> str:
    width = max(len(slot.node) for slot in plan.slots)
    lines = [f"{'slot':>4}  {'node':<{width}}  {'device':<6}  actors"]
    for slot in plan.slots:
        actors = ", ".join(f"{kind}[{rank}] {share:g}" for kind, rank, share in slot.holds)
        lines.append(f"{slot.index:>4}  {slot.node:<{width}}  {plan.device:<6}  {actors}")
    free = ", ".join(f"{name}: {left:g}" for name, left in plan.free.items())
    return "\n".join([*lines, f"free {plan.device} slots: {free}"])
