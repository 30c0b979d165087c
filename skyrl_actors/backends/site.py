"""Plan the slots of a config on the Ray cluster, check their memory, and reserve them.

While Ray's server is away, these functions wait for it.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ray.util.placement_group import PlacementGroup, remove_placement_group

from placement.reserve import cluster_nodes, gpu_ids, placed_on, reserve, standing
from placement.types import DoesNotFit, Node, Plan
from skyrl_actors.backends.backend import AdapterMemory
from skyrl_actors.backends.demands import (
    check_transfer,
    part_of,
    service_plan,
    whole_plan,
    with_host_shares,
)
from skyrl_actors.backends.memory_demands import adapter_memory, checked, refuse, shape_in
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.remote import ask


@dataclass(frozen=True, slots=True)
class Site:
    """Where the parts of a base model run.

    `devices` has the GPU ids of engines on several GPUs, by slot. `nodes` are all nodes of the
    cluster. `is_shared`: other base models have the same slots.
    """

    plan: Plan
    reserved: PlacementGroup
    devices: dict[int, str]
    nodes: list[Node]
    is_shared: bool = False


def adapters_of(config: ClusterConfig, base_folder: Path, site: Site) -> AdapterMemory:
    """Return the host memory of each rank for LoRA models. Raises ConfigError."""
    nodes = with_host_shares(config, site.nodes)
    return adapter_memory(config, shape_in(base_folder), site.plan, nodes)


async def reserved_site(
    config: ClusterConfig, base_folder: Path, report: Callable[[str], None], detached: bool
) -> Site:
    """Reserve the slots of a service with one base model.

    Raises ConfigError, with nothing reserved, if the config does not fit this cluster.
    """
    nodes = await ask(cluster_nodes)
    plan, hosts = whole_plan(config, nodes), with_host_shares(config, nodes)
    check_memory(config, base_folder, plan, hosts, report)
    # If the free resources do not suffice, or their devices are too small, the plan of all
    # resources stays: an earlier controller of this service may hold some of them, or other
    # programs may end.
    with suppress(ConfigError):
        free = service_plan(config, await ask(cluster_nodes, True))
        if free != plan:
            check_memory(config, base_folder, free, hosts, report)
        plan = free
    reserved = await _reserved(config, plan, len(nodes), report, detached)
    try:
        plan = await ask(placed_on, plan, reserved)
        return await _placed(config, plan, reserved, await ask(cluster_nodes))
    except (DoesNotFit, ConfigError) as error:
        await ask(remove_placement_group, reserved)
        raise ConfigError(str(error)) from error


async def shared_sites(
    config: ClusterConfig,
    served: Mapping[str, ClusterConfig],
    folders: Mapping[str, Path],
    report: Callable[[str], None],
    detached: bool,
) -> dict[str, Site]:
    """Reserve the slots that all base models of a service share; return the site of each.

    Raises ConfigError, with nothing reserved, if the config does not fit this cluster.
    """
    nodes = await ask(cluster_nodes)
    plan, hosts = whole_plan(config, nodes), with_host_shares(config, nodes)
    for name, own in served.items():
        check_memory(own, folders[name], part_of(plan, own.name), hosts, report)
    with suppress(ConfigError):
        free = service_plan(config, await ask(cluster_nodes, True))
        for name, own in served.items() if free != plan else ():
            check_memory(own, folders[name], part_of(free, own.name), hosts, report)
        plan = free
    reserved = await _reserved(config, plan, len(nodes), report, detached)
    try:
        plan, nodes = await ask(placed_on, plan, reserved), await ask(cluster_nodes)
        sites = {
            name: await _placed(own, part_of(plan, own.name), reserved, nodes)
            for name, own in served.items()
        }
    except (DoesNotFit, ConfigError) as error:
        await ask(remove_placement_group, reserved)
        raise ConfigError(str(error)) from error
    return {name: replace(site, is_shared=True) for name, site in sites.items()}


async def standing_sites(config: ClusterConfig, before: Mapping[str, Site]) -> dict[str, Site]:
    """Return the sites of a service whose slots are reserved; none if they are not.

    Reserves nothing. `before`: what this returned earlier; GPU ids of the same slots are not read
    again. Raises ConfigError or DoesNotFit.
    """
    nodes = await ask(cluster_nodes)
    plan = whole_plan(config, nodes)
    reserved = await ask(standing, plan, config.name)
    if reserved is None:
        return {}
    plan, sites = await ask(placed_on, plan, reserved), dict[str, Site]()
    for name, own in config.served().items():
        of_base, known = part_of(plan, own.name) if config.base_models else plan, before.get(name)
        if known is not None and (known.plan, known.reserved) == (of_base, reserved):
            sites[name] = replace(known, nodes=nodes)
        else:
            site = await _placed(own, of_base, reserved, nodes)
            sites[name] = replace(site, is_shared=bool(config.base_models))
    return sites


def check_memory(
    config: ClusterConfig,
    base_folder: Path,
    plan: Plan,
    nodes: list[Node],
    report: Callable[[str], None],
) -> None:
    """Report what does not fit the memory, or raise ConfigError, as configured."""
    _, complaints = checked(config, shape_in(base_folder), plan, nodes)
    refuse(config, complaints)
    for complaint in complaints:
        report(f"memory: {complaint}")


async def _reserved(
    config: ClusterConfig,
    plan: Plan,
    num_nodes: int,
    report: Callable[[str], None],
    detached: bool,
) -> PlacementGroup:
    # Pin slots to nodes where it matters which parts share one. Otherwise Ray may move slots when
    # a node is lost.
    pinned = num_nodes > 1 and any(
        own.transfer.type in ("shm", "ipc") or own.engine.topology.num_devices > 1
        for own in config.served().values()
    )
    patience_s = config.restart.start_timeout_s
    try:
        return await reserve(plan, config.name, patience_s, report, detached, pinned)
    except DoesNotFit as error:
        raise ConfigError(str(error)) from error


async def _placed(
    config: ClusterConfig, plan: Plan, reserved: PlacementGroup, nodes: list[Node]
) -> Site:
    """Return the site of a base model. Raises ConfigError or DoesNotFit."""
    check_transfer(config, plan)
    devices: dict[int, str] = {}
    if config.engine.topology.num_devices > 1:
        devices = await gpu_ids(plan, reserved, "engine", config.restart.start_timeout_s)
    return Site(plan, reserved, devices, nodes)
