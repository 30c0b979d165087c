"""Connect to the controllers of a service, however many it has."""

from typing import Literal

from skyrl_actors.api.client import ControllerClient, find_controller
from skyrl_actors.api.sharded_client import ShardedClient
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.shard_configs import shard_name


def client_of(config: ClusterConfig) -> ControllerClient:
    """Return the client of an ingress process. Raises ValueError if a controller does not run."""
    return client_named(config.name, config.shards.count, config.shards.spread, shares=True)


def client_named(
    service: str,
    count: int,
    spread: Literal["session", "key"] = "session",
    shares: bool = False,
) -> ControllerClient:
    """Return a client of a service with so many shards."""
    names = [shard_name(service, number) for number in range(1, count + 1)]
    shards = [ControllerClient(*find_controller(name)) for name in names]
    return shards[0] if count == 1 else ShardedClient(shards, spread, shares)
