"""The slots that a config needs on the cluster (pure)."""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from placement.planner import plan
from placement.types import Demand, DoesNotFit, Node, Plan
from skyrl_actors.config.cluster import COLOCATED_SHARE, ClusterConfig
from skyrl_actors.config.shard_configs import shard_configs, shard_number
from skyrl_actors.messages.errors import ConfigError

OF = "/"  # between a config's name and the kind of an actor


def demands_of(config: ClusterConfig, num_bases: int = 1) -> list[list[Demand]]:
    """Return demands for slots; the demands of one inner list share slots.

    `num_bases`: base models that share the slots.
    """
    engine = config.engine
    counts = {
        "policy": config.policy.num_ranks,
        "critic": config.critic.num_ranks if config.critic else 0,
        "engine": engine.num_engines * engine.topology.num_devices,
    }
    together: list[Demand] = []
    apart: list[list[Demand]] = []
    for kind, count in counts.items():
        shared = config.placement.shares(kind)
        demand = Demand(
            kind=kind,
            count=count,
            share=COLOCATED_SHARE / num_bases if shared else 1.0,
            width=engine.topology.num_devices if kind == "engine" else 1,
            block=engine.topology.tensor_parallel if kind == "engine" else 1,
        )
        if count and shared:
            together.append(demand)
        elif count:
            apart.append([demand])
    return [together, *apart] if together else apart


def plan_for(config: ClusterConfig, nodes: list[Node]) -> Plan:
    """Plan the slots. Raise ConfigError if the config does not fit the nodes."""
    try:
        made = plan(demands_of(config), nodes, config.placement.device.upper())
    except DoesNotFit as error:
        raise ConfigError(str(error)) from error
    check_transfer(config, made)
    return made


def shared_plan(
    config: ClusterConfig, served: Mapping[str, ClusterConfig], nodes: list[Node]
) -> Plan:
    """Plan the slots that all base models share. Raise ConfigError if they do not fit the nodes.

    The kinds of its actors begin with the names of the configs; see `part_of`.
    """
    demands = [
        replace(demand, kind=f"{own.name}{OF}{demand.kind}")
        for own in served.values()
        for demand in demands_of(own, len(served))[0]
    ]
    try:
        return plan([demands], nodes, config.placement.device.upper())
    except DoesNotFit as error:
        raise ConfigError(str(error)) from error


def shard_plans(config: ClusterConfig, nodes: list[Node]) -> list[Plan]:
    """Plan the slots of all shards of a service, one after the other.

    Raises:
        ConfigError: A shard does not fit what the shards before it leave.
    """
    plans: list[Plan] = []
    for own in shard_configs(config):
        try:
            plans.append(service_plan(own, nodes))
        except ConfigError as error:
            if not plans:
                raise
            raise ConfigError(
                f"shard {len(plans) + 1} of {config.shards.count} does not fit what the others "
                f"leave: {error}; use fewer shards, or give each fewer ranks and engines"
            ) from error
        nodes = _left(nodes, plans[-1])
    return plans


def service_plan(config: ClusterConfig, nodes: list[Node]) -> Plan:
    """Plan the slots of a service, or of one shard. Raises ConfigError."""
    if config.base_models:
        return shared_plan(config, config.served(), nodes)
    return plan_for(config, nodes)


def whole_plan(config: ClusterConfig, nodes: list[Node]) -> Plan:
    """Plan the slots of a shard beside those of the shards before it, if all of them fit.

    A lost node must not keep a shard from its own nodes. Raises ConfigError if it fits none.
    """
    left = nodes
    with suppress(ConfigError):
        for _ in range(1, shard_number(config.name)):
            left = _left(left, service_plan(config, left))
        return service_plan(config, left)
    return service_plan(config, nodes)


def _left(nodes: list[Node], made: Plan) -> list[Node]:
    """Return the nodes without the resources of a plan's slots."""
    taken: dict[str, Counter[str]] = {node.name: Counter() for node in nodes}
    for slot in made.slots:
        taken[slot.node].update(slot.resources)
    return [
        replace(
            node,
            cpus=node.cpus - taken[node.name]["CPU"],
            gpus=node.gpus - taken[node.name]["GPU"],
        )
        for node in nodes
    ]


def with_host_shares(config: ClusterConfig, nodes: list[Node]) -> list[Node]:
    """Return the nodes with the host memory that one shard has there.

    Shards on one node divide its host memory. If not all shards fit, as after the loss of a node,
    all may be on one.
    """
    count = config.shards.count
    if count == 1:
        return nodes
    try:
        plans = shard_plans(config, nodes)
        users = Counter(name for made in plans for name in {slot.node for slot in made.slots})
    except ConfigError:
        users = Counter({node.name: count for node in nodes})
    return [
        replace(node, host_bytes=node.host_bytes // max(users[node.name], 1))
        if node.host_bytes
        else node
        for node in nodes
    ]


def part_of(shared: Plan, name: str) -> Plan:
    """Return the plan of one base model, by the name of its config."""
    prefix = f"{name}{OF}"

    def own(values: Mapping[str, int]) -> dict[str, int]:
        return {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}

    slots = tuple(
        replace(
            slot,
            holds=tuple(
                (kind.removeprefix(prefix), rank, share)
                for kind, rank, share in slot.holds
                if kind.startswith(prefix)
            ),
        )
        for slot in shared.slots
    )
    return replace(shared, slots=slots, widths=own(shared.widths), blocks=own(shared.blocks))


def check_transfer(config: ClusterConfig, made: Plan) -> None:
    """Raise ConfigError if the transfer cannot reach from the trainers to the engines."""
    hosts = {slot.node for slot in (*made.slots_of("policy")[:1], *made.slots_of("engine"))}
    kind = config.transfer.type
    if kind in ("shm", "ipc") and len(hosts) > 1:
        raise ConfigError(
            f"transfer.type {kind} works on one host, but policy rank 0 and the engines would "
            f"be on {', '.join(sorted(hosts))}; "
            "set transfer.type=object_store"
        )
