"""Connect to the controllers of a service, however many it has."""

from collections.abc import Sequence
from typing import Literal

from skyrl_actors.api.client import ControllerClient, find_controller
from skyrl_actors.api.sharded_client import ShardedClient
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.shard_configs import shard_name

Spread = Literal["session", "key"]


def client_of(config: ClusterConfig) -> ControllerClient:
    """Return the client of an ingress process. It finds controllers that do not run yet later."""
    names = _names(config.name, config.shards.count)
    shards, has_keys = [_found(name) for name in names], bool(config.http.api_keys)
    return _client_of(shards, config.shards.spread, True, has_keys)


def client_named(service: str, count: int) -> ControllerClient:
    """Return a client of a service. Raises ValueError if a controller does not run."""
    names = _names(service, count)
    return _client_of([ControllerClient(*find_controller(name), name=name) for name in names])


def _found(name: str) -> ControllerClient:
    try:
        return ControllerClient(*find_controller(name), name=name)
    except ValueError:
        return ControllerClient(name=name)


def _client_of(
    shards: Sequence[ControllerClient],
    spread: Spread = "session",
    shares: bool = False,
    has_keys: bool = False,
) -> ControllerClient:
    return shards[0] if len(shards) == 1 else ShardedClient(shards, spread, shares, has_keys)


def _names(service: str, count: int) -> list[str]:
    return [shard_name(service, number) for number in range(1, count + 1)]
