"""Plan the slots of a config on the Ray cluster, check their memory, and reserve them."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ray.util.placement_group import PlacementGroup, remove_placement_group

from placement.reserve import cluster_nodes, gpu_ids, placed_on, reserve
from placement.types import DoesNotFit, Plan
from skyrl_actors.backends.backend import AdapterMemory
from skyrl_actors.backends.demands import check_transfer, plan_for
from skyrl_actors.backends.memory_demands import adapter_memory, checked, refuse, shape_in
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.messages.errors import ConfigError


def adapters_of(config: ClusterConfig, base_folder: Path, plan: Plan) -> AdapterMemory:
    """Return the host memory of each rank for LoRA models. Raises ConfigError."""
    return adapter_memory(config, shape_in(base_folder), plan, cluster_nodes())


async def reserved_site(
    config: ClusterConfig, base_folder: Path, report: Callable[[str], None], detached: bool
) -> tuple[Plan, PlacementGroup, dict[int, str]]:
    """Reserve the slots; return the plan as placed, the slots, and GPU ids of multi-GPU engines.

    Raises ConfigError, with nothing reserved, if the config does not fit this cluster.
    """
    nodes = cluster_nodes()
    plan = plan_for(config, nodes)
    _, complaints = checked(config, shape_in(base_folder), plan, nodes)
    refuse(config, complaints)
    for complaint in complaints:
        report(f"memory: {complaint}")
    # If the free resources do not suffice, the plan of all resources stays: an earlier controller
    # of this service may hold some of them, or other programs may end.
    with suppress(ConfigError):
        plan = plan_for(config, cluster_nodes(free=True))
    # Pin slots to nodes where it matters which parts share one. Otherwise Ray may move slots when
    # a node is lost.
    pinned = len(nodes) > 1 and (
        config.transfer.type in ("shm", "ipc") or config.engine.topology.num_devices > 1
    )
    patience_s = config.restart.start_timeout_s
    try:
        reserved = await reserve(plan, config.name, patience_s, report, detached, pinned)
    except DoesNotFit as error:
        raise ConfigError(str(error)) from error
    try:
        plan = placed_on(plan, reserved)
        check_transfer(config, plan)
        devices = {}
        if config.engine.topology.num_devices > 1:
            devices = await gpu_ids(plan, reserved, "engine", patience_s)
    except (DoesNotFit, ConfigError) as error:
        remove_placement_group(reserved)
        raise ConfigError(str(error)) from error
    return plan, reserved, devices
