"""What a config asks of the cluster (pure)."""

from placement.planner import plan
from placement.types import Demand, DoesNotFit, Node, Plan
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.messages.errors import ConfigError


def demands_of(config: ClusterConfig) -> list[Demand]:
    share = config.placement.colocated_share if config.placement.layout == "colocated" else 1.0
    counts = {
        "policy": config.policy.num_ranks,
        "critic": config.critic.num_ranks if config.critic else 0,
        "engine": config.engine.num_engines,
    }
    return [Demand(kind, count, share) for kind, count in counts.items() if count]


def plan_for(config: ClusterConfig, nodes: list[Node]) -> Plan:
    """Raises ConfigError when the config does not fit the nodes."""
    try:
        made = plan(demands_of(config), nodes, config.placement.device.upper(), config.placement.layout == "colocated")
    except DoesNotFit as error:
        raise ConfigError(str(error)) from error
    hosts = {slot.node for slot in (*made.slots_of("policy")[:1], *made.slots_of("engine"))}
    if config.transfer.type == "shm" and len(hosts) > 1:
        raise ConfigError(
            f"transfer.type shm works on one host, but policy rank 0 and the engines would be on {', '.join(sorted(hosts))}; "
            "set transfer.type=object_store"
        )
    return made
