"""The controllers of a running service: its shards, and what they have in common."""

import re
import time

from skyrl_actors import remote
from skyrl_actors.api.client import ControllerClient, find_controller
from skyrl_actors.api.connect import client_named
from skyrl_actors.api.shared_settings import SharedSettings
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.shard_configs import shard_configs, shard_name
from skyrl_actors.controller.checkpoints import folders_of
from skyrl_actors.controller.standby import actor_names
from skyrl_actors.messages.errors import ConfigError


def num_shards(service: str) -> int:
    """Return how many shards of a service have a part that runs."""
    pattern = re.compile(rf"{re.escape(service)}\.([1-9][0-9]*):.+")
    names = remote.names_with(f"{service}.")
    numbers = [int(found[1]) for name in names if (found := pattern.fullmatch(name))]
    return max(numbers, default=1)


def running_client(service: str) -> ControllerClient:
    """Return a client of a service that runs. Raises ConfigError if a controller is missing."""
    try:
        return client_named(service, num_shards(service))
    except ValueError:
        raise ConfigError(
            f"a controller of {service!r} does not run; `skyrl-actors stop --name {service}` ends "
            "the others, and the journals keep their state"
        ) from None


def is_running(name: str) -> bool:
    """Return whether the controller of a shard runs."""
    return remote.named(actor_names(name)[0]) is not None


def shard_names(service: str, at_least: int = 1) -> list[str]:
    """Return the names of the shards of a service of which a part may run."""
    count = max(at_least, num_shards(service))
    return [shard_name(service, number) for number in range(1, count + 1)]


def fetch_checkpoints(config: ClusterConfig) -> None:
    """Fetch the checkpoints of all shards from the mirror, before a shard uses those of others.

    If the mirror does not answer, the shards fetch them later.
    """
    if config.shards.count > 1:
        try:
            folders_of(config, time.time).alignment.fetch()
        except OSError as error:
            print(f"· the mirror of checkpoints does not answer: {error}")


async def share_settings(config: ClusterConfig) -> None:
    """Give the keys, limits and mode of the first shard to the others, which may be new.

    Raises ConfigError if limits of keys cannot be kept.
    """
    names = [own.name for own in shard_configs(config)]
    if len(names) == 1:
        return
    first, *others = (ControllerClient(*find_controller(name)) for name in names)
    shared = await SharedSettings.read(first)
    if config.shards.spread == "session" and shared.has_limits:
        raise ConfigError(
            "keys have limits, which need all sessions of a key on one controller; set "
            "shards.spread=key, or shards.count=1 and remove them (`skyrl-actors key limit`)"
        )
    for other in others:
        await shared.give(other)
