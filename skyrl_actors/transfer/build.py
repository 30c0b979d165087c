"""The configured transfer."""

from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.transfer.base import Transfer
from skyrl_actors.transfer.object_store import ObjectStoreTransfer
from skyrl_actors.transfer.shm import ShmTransfer


def build_transfer(config: ClusterConfig) -> Transfer:
    folder = config.transfer.folder / config.name
    return ShmTransfer(folder) if config.transfer.type == "shm" else ObjectStoreTransfer(folder)
