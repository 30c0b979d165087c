"""Build the backend that the config describes."""

from collections.abc import Callable, Mapping
from pathlib import Path

from skyrl_actors.backends.backend import Backend
from skyrl_actors.backends.base_models import check_base
from skyrl_actors.config.cluster import ClusterConfig


def build_backend(
    config: ClusterConfig,
    base_folders: Mapping[str, Path],
    report: Callable[[str], None],
    detached: bool,
) -> Backend:
    """Check the base models and return a backend that is not started. Raises ConfigError.

    `base_folders` is by the name of a base model.
    """
    from skyrl_actors.backends.base_model_factory import RayBaseModelFactory
    from skyrl_actors.backends.catalogue import CatalogueBackend
    from skyrl_actors.backends.ray_backend import RayBackend

    for name, own in config.served().items():
        check_base(base_folders[name], own)
    if config.base_models:
        factory = RayBaseModelFactory(config, base_folders, report, detached)
        return CatalogueBackend(factory, report, max(config.restart.max_in_a_row, 1))
    return RayBackend(config, base_folders[config.base_model.name], report, detached)
