"""The controllers of a running service: its shards, and what they have in common."""

import re

from skyrl_actors import remote
from skyrl_actors.api.client import ControllerClient, find_controller
from skyrl_actors.api.connect import client_named
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.shard_configs import shard_configs, shard_name
from skyrl_actors.controller.standby import actor_names

FIRST_SHARD = "the first shard"  # who sets the mode of a shard that was added


def num_shards(service: str) -> int:
    """Return how many controllers of a service run."""
    pattern = re.compile(rf"{re.escape(service)}\.([1-9][0-9]*):controller")
    names = remote.names_with(f"{service}.")
    numbers = [int(found[1]) for name in names if (found := pattern.fullmatch(name))]
    return max(numbers, default=1)


def running_client(service: str) -> ControllerClient:
    """Return a client of a service that runs. Raises ValueError if it does not."""
    return client_named(service, num_shards(service))


def shard_names(service: str) -> list[str]:
    """Return the names of the shards of a running service."""
    return [shard_name(service, number) for number in range(1, num_shards(service) + 1)]


def controller_names(service: str) -> list[str]:
    """Return the names of all controllers' actors, with those of standby processes."""
    return [name for shard in shard_names(service) for name in actor_names(shard)]


async def share_settings(config: ClusterConfig) -> None:
    """Give the keys, limits and mode of the first shard to the others, which may be new."""
    names = [own.name for own in shard_configs(config)]
    if len(names) == 1:
        return
    first, *others = (ControllerClient(*find_controller(name)) for name in names)
    table = await first.calls.known_keys("")
    quotas, mode = await first.calls.list_quotas(), (await first.calls.status())["mode"]
    for other in others:
        await other.calls.take_keys([] if table is None else list(table.keys))
        await other.calls.take_quotas(quotas)
        await other.calls.set_mode(mode, FIRST_SHARD)
