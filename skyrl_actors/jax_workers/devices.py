"""The devices that JAX computes on, and what it reads at its first use."""

import os
from pathlib import Path

import jax

from skyrl_actors.config.strategies import JaxStrategy
from skyrl_actors.jax_workers.arrays import Device
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.storage.private_folders import make_folder


def configure(strategy: JaxStrategy) -> None:
    """Set what JAX reads at its first use."""
    folder = strategy.cache or default_cache()
    make_folder(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # TPUs and GPUs round products of float32 otherwise.
    jax.config.update("jax_default_matmul_precision", "highest")


def default_cache() -> Path:
    """Return the folder of compiled programs if the config names none."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "skyrl-actors" / "jax"


def device_for(kind: str) -> Device:
    """Return the device of a rank. Raises ConfigError if JAX does not see one of this kind."""
    if kind == "cpu":
        return jax.devices("cpu")[0]
    found = [device for device in jax.devices() if device.platform != "cpu"]
    if not found:
        seen = ", ".join(str(device) for device in jax.devices())
        raise ConfigError(
            f"strategy jax: placement.device is {kind}, and JAX sees only {seen}; install JAX "
            "for this accelerator, for example pip install 'jax[cuda12]'"
        )
    return found[0]
