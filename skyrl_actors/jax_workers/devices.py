"""The devices that JAX computes on, and what it reads at its first use."""

import os
from pathlib import Path

import jax

from skyrl_actors.config.strategies import JaxStrategy
from skyrl_actors.jax_workers.arrays import Device, OneDevice
from skyrl_actors.messages.errors import ConfigError


def configure() -> None:
    """Set what JAX reads at its first use."""
    # `ExecutableFiles` keeps programs. What JAX reads from its own cache cannot be written again,
    # and on a mesh of CPUs it can deadlock; see `DeviceMesh.keeps_programs`.
    jax.config.update("jax_enable_compilation_cache", False)
    # TPUs and GPUs round products of float32 otherwise.
    jax.config.update("jax_default_matmul_precision", "highest")


def cache_of(strategy: JaxStrategy) -> Path:
    """Return the folder of compiled programs."""
    if strategy.cache:
        return strategy.cache
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "skyrl-actors" / "jax"


def device_for(kind: str) -> OneDevice:
    """Return the device of a rank. Raises ConfigError if JAX does not see one of this kind."""
    return OneDevice(own_device(kind))


def num_threads() -> int:
    """Return the threads of XLA on a CPU."""
    return int(os.environ.get("NPROC") or os.cpu_count() or 1)


def own_device(kind: str) -> Device:
    """Return the first device of this process of this kind. Raises ConfigError if it has none."""
    if kind == "cpu":
        return jax.local_devices(backend="cpu")[0]
    found = [device for device in jax.local_devices() if device.platform != "cpu"]
    if not found:
        seen = ", ".join(str(device) for device in jax.devices())
        raise ConfigError(
            f"strategy jax: placement.device is {kind}, and JAX sees only {seen}; install JAX "
            "for this accelerator, for example pip install 'jax[cuda12]'"
        )
    return found[0]
