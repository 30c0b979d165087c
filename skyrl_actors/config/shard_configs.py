"""The config of each shard of a service (pure).

The first shard has the name and the journal of the service, so that a service can get more shards
later. Shard 2 of `tinker` is `tinker.2`; names of services have no dot.
"""

import re
from collections.abc import Callable

from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.paths import TinkerPath, shard_of

_NAME = re.compile(r"[^.:]+\.([1-9][0-9]*)(?::.*)?")


def shard_name(service: str, number: int) -> str:
    """Return the name of a shard. Numbers begin with 1."""
    return service if number == 1 else f"{service}.{number}"


def shard_number(name: str) -> int:
    """Return the number of the shard with this name, or of a base model's config in it."""
    match = _NAME.fullmatch(name)
    return int(match.group(1)) if match else 1


def shard_configs(config: ClusterConfig) -> list[ClusterConfig]:
    """Return the config of each shard, in the order of their numbers."""
    return [_of_shard(config, number) for number in range(1, config.shards.count + 1)]


def refuse_other_shard(path: TinkerPath, config: ClusterConfig) -> None:
    """Raise InvalidRequest for a past step that another shard than this one has."""
    own, number = shard_number(config.name), shard_of(path.model_id)
    if number != own:
        raise InvalidRequest(
            f"{path} is a past step on shard {number}, and this session is on shard {own}; save "
            "the model there (save_weights), and load the checkpoint"
        )


def keeper(config: ClusterConfig) -> Callable[[str], bool]:
    """Return whether the shard of this config cleans up what belongs to an id.

    The first shard also cleans up after shards that the service no longer has.
    """
    own, count = shard_number(config.name), config.shards.count

    def keeps(text: str) -> bool:
        number = shard_of(text)
        return own == (number if number <= count else 1)

    return keeps


def _of_shard(config: ClusterConfig, number: int) -> ClusterConfig:
    if number == 1:
        return config
    return config.model_copy(
        update={
            "name": shard_name(config.name, number),
            "journal": config.journal.of_shard(number),
        }
    )
