"""Slots for a config on the Ray cluster that is there: planned, proven to have the memory, reserved."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ray.util.placement_group import PlacementGroup

from placement.reserve import cluster_nodes, gpu_ids, placed_on, reserve
from placement.types import DoesNotFit, Plan
from skyrl_actors.backends.demands import check_transfer, plan_for
from skyrl_actors.backends.memory_demands import checked, refuse, shape_in
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.messages.errors import ConfigError


async def reserved_site(
    config: ClusterConfig, base_folder: Path, say: Callable[[str], None], detached: bool
) -> tuple[Plan, PlacementGroup, dict[int, str]]:
    """The plan as it was placed, its slots, and the ids of GPUs of engines that have several.

    Raises ConfigError, with nothing held, when the config does not fit this cluster."""
    nodes = cluster_nodes()
    plan = plan_for(config, nodes)
    _, complaints = checked(config, shape_in(base_folder), plan, nodes)
    refuse(config, complaints)
    for complaint in complaints:
        say(f"memory: {complaint}")
    try:
        plan = plan_for(config, cluster_nodes(free=True))
    except ConfigError:
        # What is free now does not do: an earlier controller of this service may hold the slots, or others may end.
        plan = replace(plan, slots=tuple(replace(slot, node="") for slot in plan.slots))
    try:
        reserved = await reserve(plan, config.name, config.placement.timeout_s, say, detached)
        plan = placed_on(plan, reserved)
        several = config.engine.num_devices > 1
        devices = await gpu_ids(plan, reserved, "engine", config.placement.timeout_s) if several else {}
    except DoesNotFit as error:
        raise ConfigError(str(error)) from error
    check_transfer(config, plan)
    return plan, reserved, devices
