"""Build the backend that the config describes."""

from collections.abc import Callable
from pathlib import Path

from skyrl_actors.backends.backend import Backend
from skyrl_actors.backends.base_models import check_base
from skyrl_actors.config.cluster import ClusterConfig


def build_backend(
    config: ClusterConfig, base_folder: Path, report: Callable[[str], None], detached: bool
) -> Backend:
    """Check the base model and return a backend that is not started. Raises ConfigError."""
    from skyrl_actors.backends.ray_backend import RayBackend

    check_base(base_folder, config)
    return RayBackend(config, base_folder, report, detached)
