"""Build the transfer that the config describes."""

from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.transfers import StreamTransferConfig
from skyrl_actors.transfer.files import FileTransfer
from skyrl_actors.transfer.object_store import ObjectStoreTransfer
from skyrl_actors.transfer.shared_device import SharedDeviceTransfer
from skyrl_actors.transfer.streaming import StreamTransfer
from skyrl_actors.transfer.transport import Transfer

STREAM_TIMEOUT_S = 120.0  # longest wait of one end of a stream for the other


def build_transfer(config: ClusterConfig) -> Transfer:
    """Return the configured transfer, with a folder of this service's own."""
    asked, folder = config.transfer, config.transfer_folder
    if isinstance(asked, StreamTransferConfig) and asked.type != "ipc":
        return StreamTransfer(
            folder,
            asked.checksums,
            asked.type,
            asked.bucket_bytes,
            STREAM_TIMEOUT_S,
            asked.materialize,
        )
    if isinstance(asked, StreamTransferConfig):
        return SharedDeviceTransfer(
            folder,
            asked.checksums,
            asked.bucket_bytes,
            STREAM_TIMEOUT_S,
            asked.materialize,
            shares=config.policy.full_strategy_on(config.placement.device).type != "replica",
        )
    if asked.type == "object_store":
        return ObjectStoreTransfer(folder, asked.checksums)
    return FileTransfer(folder, asked.checksums)
