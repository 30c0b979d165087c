"""Reserve a plan's slots as a Ray placement group. The only module here that imports ray."""

import asyncio
from collections.abc import Callable

import ray
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group, remove_placement_group

from placement.types import DoesNotFit, Node, Plan


def cluster_nodes() -> list[Node]:
    """Living nodes of the Ray cluster with what each has in all. Names are those of the hosts; of two nodes on one host the
    second bears its id as well."""
    found: dict[str, Node] = {}
    for n in ray.nodes():
        if n["Alive"]:
            name = n["NodeManagerHostname"]
            name = f"{name}/{n['NodeID'][:8]}" if name in found else name
            found[name] = Node(name, n["Resources"].get("CPU", 0.0), n["Resources"].get("GPU", 0.0))
    return list(found.values())


def reserved_before(plan: Plan, name: str) -> PlacementGroup | None:
    """Slots that an earlier process of this service reserved, if they are those of the plan; others are given back."""
    try:
        group = get_placement_group(name)
    except ValueError:
        return None
    if group.bundle_specs == [slot.resources for slot in plan.slots]:
        return group
    remove_placement_group(group)
    return None


async def reserve(plan: Plan, name: str, timeout_s: float, say: Callable[[str], None], detached: bool = False) -> PlacementGroup:
    """Wait until all slots are held. Raises DoesNotFit at the deadline, with what the cluster has free. `detached` slots
    outlive this process."""
    before = reserved_before(plan, name) if detached else None
    if before is not None:
        return before
    lifetime = "detached" if detached else None
    group = placement_group([slot.resources for slot in plan.slots], strategy="PACK", name=name, lifetime=lifetime)
    say(f"waiting for {len(plan.slots)} {plan.device} slot(s) (placement group {name}, at most {timeout_s:.0f} s)")
    try:
        await asyncio.wait_for(group.ready(), timeout_s)  # type: ignore[arg-type]
    except TimeoutError:
        remove_placement_group(group)
        total, free = ray.cluster_resources(), ray.available_resources()
        raise DoesNotFit(
            f"placement group {name}: {len(plan.slots)} bundles of {plan.slots[0].resources} were not placed within {timeout_s:.0f} s; "
            + "; ".join(f"{key}: {free.get(key, 0.0):g} free of {total.get(key, 0.0):g}" for key in ("CPU", "GPU"))
            + "; stop what holds the rest, or ask for fewer ranks and engines"
        ) from None
    return group
