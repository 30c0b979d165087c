"""Decide who goes where, before anything starts (pure).

Colocated demands share their slots rank by rank; separate demands have slots of their own. A group goes to the node it
fills best; one that no node can hold starts on the emptiest node and spills over to the next emptiest.
"""

from collections.abc import Sequence

from placement.types import Demand, DoesNotFit, Node, Plan, Slot


def plan(demands: Sequence[Demand], nodes: Sequence[Node], device: str, colocated: bool) -> Plan:
    """Raises DoesNotFit with what is asked and what there is."""
    groups = [list(demands)] if colocated else [[demand] for demand in demands]
    for group in groups:
        _check_shares(group)
    wanted = sum(max(demand.count for demand in group) for group in groups)
    free = {node.name: _capacity(node, device) for node in nodes}
    if wanted > sum(free.values()):
        raise DoesNotFit(_arithmetic(groups, wanted, free, device))
    slots: list[Slot] = []
    for group in groups:
        count = max(demand.count for demand in group)
        node = ""
        for rank in range(count):
            node = node if node and free[node] > 0 else _next_node(free, count - rank)
            free[node] -= 1
            holds = tuple((demand.kind, rank, demand.share) for demand in group)
            slots.append(Slot(len(slots), node, _resources(device), holds))
    return Plan(device, tuple(slots), {name: float(left) for name, left in free.items()})


def _capacity(node: Node, device: str) -> int:
    """Whole slots a node has: a GPU slot needs a CPU too."""
    return int(min(node.gpus, node.cpus)) if device == "GPU" else int(node.cpus)


def _resources(device: str) -> dict[str, float]:
    return {"GPU": 1.0, "CPU": 1.0} if device == "GPU" else {"CPU": 1.0}


def _next_node(free: dict[str, int], wanted: int) -> str:
    """The tightest node that holds all that is wanted, else the emptiest one. Ties go to the first."""
    fitting = [name for name in free if free[name] >= wanted]
    return min(fitting, key=lambda name: free[name]) if fitting else max(free, key=lambda name: free[name])


def _check_shares(group: Sequence[Demand]) -> None:
    total = sum(demand.share for demand in group)
    if total > 1.0 + 1e-9:
        raise DoesNotFit(f"{' + '.join(f'{d.kind} {d.share:g}' for d in group)} = {total:g} of a slot; a slot is 1")
    counts = {demand.count for demand in group}
    if len(counts) > 1:
        raise DoesNotFit(f"colocated actors share slots one to one, but {', '.join(f'{d.kind} has {d.count}' for d in group)}")


def _arithmetic(groups: Sequence[Sequence[Demand]], wanted: int, free: dict[str, int], device: str) -> str:
    asks = " + ".join(f"{max(d.count for d in g)} ({' & '.join(d.kind for d in g)})" for g in groups)
    has = " + ".join(f"{count} ({name})" for name, count in free.items()) or "0 (no nodes)"
    short = wanted - sum(free.values())
    return f"needs {asks} = {wanted} {device} slots; the nodes have {has} = {sum(free.values())}; {short} short"
