"""Plan the placement of actors on nodes, before anything starts.

Demands of one group share slots, rank by rank. Each group has its own slots. A group goes to the
node that it fills best. If it fits no node, it goes to the NVLink domain, rack, zone or region that
it fills best, and takes the emptiest nodes first. The devices of a `block` stay on one node. Groups
with the largest blocks are placed first. This module is pure.
"""

from collections.abc import Sequence

from placement.types import Demand, DoesNotFit, Node, Plan, Slot

# Node labels (`ray start --labels`), nearest first.
LEVELS = ("nvlink-domain", "rack", "ray.io/availability-zone", "ray.io/region")


def plan(groups: Sequence[Sequence[Demand]], nodes: Sequence[Node], device: str) -> Plan:
    """Return a plan for all groups.

    Raises:
        DoesNotFit: The message contains the demanded and the existing slots.
    """
    for group in groups:
        _check_group(group)
    room = _Room(nodes)
    chosen: dict[int, list[str]] = {}
    for index in sorted(range(len(groups)), key=lambda i: -_block(groups[i])):
        group = groups[index]
        chosen[index] = room.take(
            group[0].count, _block(group), _width(group), _resources(group[0].device or device)
        )
        if not chosen[index]:
            raise DoesNotFit(_arithmetic(groups, group, nodes, room, device))
    slots: list[Slot] = []
    for index, group in enumerate(groups):
        for rank, node in enumerate(chosen[index]):
            holds = tuple((demand.kind, rank, demand.share) for demand in group)
            slots.append(
                Slot(
                    index=len(slots),
                    node=node,
                    resources=_resources(group[0].device or device),
                    holds=holds,
                )
            )
    everybody = [demand for group in groups for demand in group]
    return Plan(
        device=device,
        slots=tuple(slots),
        free={node.name: float(room.capacity(node.name, _resources(device))) for node in nodes},
        widths={demand.kind: demand.width for demand in everybody},
        blocks={demand.kind: demand.block for demand in everybody},
    )


class _Room:
    """The free devices of the nodes."""

    def __init__(self, nodes: Sequence[Node]):
        self._free = {node.name: {"GPU": node.gpus, "CPU": node.cpus} for node in nodes}
        levels: list[dict[str, list[str]]] = [{node.name: [node.name] for node in nodes}]
        for label in LEVELS:
            domains: dict[str, list[str]] = {}
            for node in nodes:
                if label in node.labels:
                    domains.setdefault(node.labels[label], []).append(node.name)
            levels.append(domains)
        self._levels = [*levels, {"": [node.name for node in nodes]}]

    def capacity(self, node: str, needs: dict[str, float]) -> int:
        return int(min(self._free[node][key] // amount for key, amount in needs.items()))

    def take(self, count: int, block: int, width: int, needs: dict[str, float]) -> list[str]:
        """Take `count` slots. Return the node of each, or an empty list if they do not fit."""
        blocks = {name: self.capacity(name, needs) // block for name in self._free}
        wanted = count // block
        for domains in self._levels:
            sizes = {
                name: sum(blocks[node] for node in members) for name, members in domains.items()
            }
            fitting = [name for name in sizes if sizes[name] >= wanted]
            if fitting:
                members = domains[min(fitting, key=lambda name: sizes[name])]
                members = sorted(members, key=lambda node: -blocks[node])
                # An actor of several blocks stays on one node if possible, and is spread otherwise.
                whole = self._fill(
                    members,
                    {n: blocks[n] * block // width for n in members},
                    count // width,
                    width,
                    needs,
                )
                left = {n: self.capacity(n, needs) // block for n in members}
                return whole + self._fill(
                    members, left, (count - len(whole)) // block, block, needs
                )
        return []

    def _fill(
        self,
        members: list[str],
        blocks: dict[str, int],
        wanted: int,
        block: int,
        needs: dict[str, float],
    ) -> list[str]:
        chosen: list[str] = []
        for node in members:
            number = min(blocks[node], wanted - len(chosen) // block) * block
            chosen += [node] * number
            for key, amount in needs.items():
                self._free[node][key] -= amount * number
        return chosen


def _block(group: Sequence[Demand]) -> int:
    return max(demand.block for demand in group)


def _width(group: Sequence[Demand]) -> int:
    return max(demand.width for demand in group)


def _resources(device: str) -> dict[str, float]:
    return {"GPU": 1.0, "CPU": 1.0} if device == "GPU" else {"CPU": 1.0}


def _check_group(group: Sequence[Demand]) -> None:
    for demand in group:
        if demand.count % demand.width or demand.width % demand.block:
            raise DoesNotFit(
                f"{demand.kind}: count {demand.count} must be a multiple of width {demand.width}, "
                f"and width of block {demand.block}"
            )
    total = sum(demand.share for demand in group)
    if total > 1.0 + 1e-9:
        raise DoesNotFit(
            f"{' + '.join(f'{d.kind} {d.share:g}' for d in group)} = {total:g} of a slot; "
            "a slot is 1"
        )
    if len({demand.count for demand in group}) > 1:
        raise DoesNotFit(
            "colocated actors share slots one to one, but "
            f"{', '.join(f'{d.kind} has {d.count}' for d in group)}"
        )


def _arithmetic(
    groups: Sequence[Sequence[Demand]],
    short_of: Sequence[Demand],
    nodes: Sequence[Node],
    room: _Room,
    device: str,
) -> str:
    """Compare the whole demand with all nodes.

    If it fits in total, explain why one group does not.
    """
    alike = [
        group for group in groups if (group[0].device or device) == (short_of[0].device or device)
    ]
    wanted = sum(group[0].count for group in alike)
    kind = short_of[0].device or device
    there = {node.name: _Room([node]).capacity(node.name, _resources(kind)) for node in nodes}
    asks = " + ".join(f"{group[0].count} ({' & '.join(d.kind for d in group)})" for group in alike)
    has = " + ".join(f"{count} ({name})" for name, count in there.items()) or "0 (no nodes)"
    text = f"needs {asks} = {wanted} {kind} slots; the nodes have {has} = {sum(there.values())}"
    if wanted > sum(there.values()):
        return f"{text}; {wanted - sum(there.values())} short"
    block = _block(short_of)
    left = {node.name: room.capacity(node.name, _resources(kind)) for node in nodes}
    blocks = sum(count // block for count in left.values())
    names = " & ".join(demand.kind for demand in short_of)
    return (
        f"{text}; {names} needs {short_of[0].count // block} times {block} on one node, "
        "and what the others leave "
        f"({', '.join(f'{name}: {count}' for name, count in left.items())}) holds {blocks}; "
        "use fewer devices for each engine (engine.tensor_parallel), or nodes with more"
    )
