"""`upgrade`: replace the controller and the ingress of a running service by this version of them.

The old controller is killed, as by a crash: its journal has every accepted request, and ranks and
engines live on. The new one attaches to those that speak its protocol and have its configuration.
It restarts the others, and restores their models from the journal.
"""

import asyncio
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path

from ray.exceptions import RayError

from skyrl_actors import remote
from skyrl_actors.api.client import find_controller
from skyrl_actors.commands import cluster, serve
from skyrl_actors.commands.controllers import share_settings
from skyrl_actors.commands.terminal import console, note
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.keys import masked
from skyrl_actors.config.load import differing, load, to_yaml
from skyrl_actors.config.shard_configs import shard_configs
from skyrl_actors.controller.standby import actor_names
from skyrl_actors.journal.journal import reading
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.remote import typed_ray

STATE = (
    "name",
    "base_model.",
    "base_models",
    "journal.folder",
    "journal.url",
    "checkpoint_dir",
    "http.host",
    "http.port",
    "shards",
)


def run(config_path: Path, overrides: Sequence[str]) -> None:
    """Upgrade a running service. Raises ConfigError before anything is changed."""
    config = serve.with_absolute_paths(load(config_path, overrides))
    serve.join(config.name)
    _check_same_state(config)
    for shard in shard_configs(config):
        with reading(shard.journal):  # raises if a newer version wrote it
            pass
    base_folders = cluster.prepare_base_models(config)
    note("ending the old controller; clients wait")
    asyncio.run(_replaced(config, base_folders))
    serve.start_ingress(config)
    serve.wait_until_healthy(config)
    console.print(f"{config.name} runs this version at {serve.url(config)}")


def _check_same_state(config: ClusterConfig) -> None:
    """Raise ConfigError if the running service has its state elsewhere."""
    try:
        running: ClusterConfig = typed_ray.get(
            find_controller(config.name)[0].settings.remote(), timeout=serve.SETTINGS_S
        )
        changed = differing(to_yaml(running), to_yaml(config))
    except (RayError, pickle.PickleError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"the settings of the running service cannot be read by this version ({error}); use "
            "skyrl-actors stop and skyrl-actors serve, for which clients wait up to 5 minutes"
        ) from None
    if keys := [key for key in changed if key.startswith(STATE)]:
        raise ConfigError(
            f"the running service has other values: {masked('; '.join(keys))}; an upgrade keeps "
            "name, address, base model, journal, checkpoints and shards"
        )


async def _replaced(config: ClusterConfig, base_folders: Mapping[str, Path]) -> None:
    """Replace the controllers of all shards at the same time: their slots are reserved already."""
    shards = shard_configs(config)
    for own in shards:
        await remote.end_named(actor_names(own.name))
    await asyncio.gather(*(cluster.start_controller(own, base_folders) for own in shards))
    await share_settings(config)
