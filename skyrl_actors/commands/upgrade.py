"""`upgrade`: replace the controller and the ingress of a running service by this version of them.

The old controller is killed, as by a crash: its journal has every accepted request, and ranks and
engines live on. The new one attaches to those that speak its protocol and have its configuration.
It restarts the others, and restores their models from the journal.
"""

import asyncio
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from skyrl_actors import remote
from skyrl_actors.commands import cluster, operate, serve
from skyrl_actors.commands.controllers import share_settings
from skyrl_actors.commands.how_to_use import local_url
from skyrl_actors.commands.one_service import refuse_shard
from skyrl_actors.commands.terminal import console, note
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.keys import left_out, masked
from skyrl_actors.config.load import differing, load, to_yaml
from skyrl_actors.config.shard_configs import shard_configs, shard_number
from skyrl_actors.controller.standby import actor_names
from skyrl_actors.journal.journal import reading
from skyrl_actors.messages.errors import ConfigError, InternalError
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


def run(config_path: Path, overrides: Sequence[str], drop_keys: bool) -> None:
    """Upgrade a running service. Raises ConfigError before anything is changed.

    `drop_keys` allows a config without keys that the running service accepts.
    """
    config = serve.with_absolute_paths(load(config_path, overrides))
    shards = shard_configs(config)
    found = _running(config.name, shards)
    if found is None:
        note("no controller runs, as after an interrupted upgrade; its settings are not compared")
    else:
        _check_same_state(*found, drop_keys)
    for shard in shards:
        with reading(shard.journal):  # raises if a newer version wrote it
            pass
    base_folders = cluster.prepare_base_models(config)
    note("ending the old controller; clients wait")
    faults = asyncio.run(_replaced(shards, base_folders))
    serve.start_ingress(config)  # also for a part of the shards, which serve their sessions
    if faults:
        raise InternalError(
            f"{'; '.join(faults)}. "
            + ("The other shards run this version. " if len(faults) < len(shards) else "")
            + "The journals keep everything: remove the cause and run `upgrade` again"
        )
    asyncio.run(share_settings(config))
    serve.wait_until_healthy(config)
    console.print(f"{config.name} runs this version at {local_url(config)}")
    if operate.mode_of(config.name) == "draining":
        operate.set_mode("running", config.name)


def _running(
    name: str, shards: Sequence[ClusterConfig]
) -> tuple[ClusterConfig, ActorHandle[Any]] | None:
    """Return a shard's config and its controller, or None if only other parts run.

    Raises ConfigError if nothing of it runs here.
    """
    refuse_shard(name)
    try:
        if not ray.is_initialized():
            cluster.join_ray()
    except ConnectionError:
        serve.join(name)  # raises, and names the services that run here
    for own in shards:
        if (running := remote.named(actor_names(own.name)[0])) is not None:
            return own, running
    if not remote.names_with(f"{name}:"):
        serve.join(name)
    return None


def _check_same_state(config: ClusterConfig, controller: ActorHandle[Any], drop_keys: bool) -> None:
    """Raise ConfigError if the running service has its state elsewhere, or keys that would end."""
    try:
        running: ClusterConfig = typed_ray.get(
            controller.settings.remote(), timeout=serve.SETTINGS_S
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
    if not drop_keys and (lost := left_out(running.http.api_keys, config.http.api_keys)):
        raise ConfigError(
            f"the running service accepts keys that this config lacks: {', '.join(lost)}; set "
            "http.api_keys, http.api_keys_file or SKYRL_ACTORS_API_KEYS as at its start, or let "
            "these keys end with --drop-keys"
        )


async def _replaced(shards: Sequence[ClusterConfig], base_folders: Mapping[str, Path]) -> list[str]:
    """Replace the controllers of all shards at the same time: their slots are reserved already.

    Returns why shards could not be replaced. One does not hinder the others.
    """

    async def replaced(own: ClusterConfig) -> None:
        await remote.end_named(actor_names(own.name))
        await cluster.start_controller(own, base_folders)

    outcomes = await asyncio.gather(*map(replaced, shards), return_exceptions=True)
    return [
        f"shard {shard_number(own.name)} did not start: {error}"
        for own, error in zip(shards, outcomes, strict=True)
        if error is not None
    ]
