"""Send a version of the weights to engines, from the live weights or from its file."""

from collections.abc import Collection

import torch

from skyrl_actors.messages.weights import WeightManifest, WeightStream
from skyrl_actors.transport import streams
from skyrl_actors.workers.gather_queue import GatherQueue
from skyrl_actors.workers.models import TrainedModel
from skyrl_actors.workers.state import is_whole


def opened(
    model: TrainedModel | None,
    manifest: WeightManifest,
    asked: WeightStream,
    device: torch.device,
    patience_s: float,
) -> WeightStream:
    """Start to send a version. `model` is the one whose live weights still equal it, if any.

    The live weights are sent if the version is unwritten or an engine shares their device. The
    file can be read while training continues.
    """
    version, state = manifest.version, model.state if model else None
    if (
        model
        and state
        and is_whole(state)
        and (asked.backend == "ipc" or version not in model.versions.written)
    ):
        take = streams.from_live(manifest.tensors, state.live())
        found, sender = streams.open_stream(manifest, asked, device, take)
        model.versions.read_by(sender)
    elif model and version not in model.versions.written:
        wait_s = min(asked.timeout_s, patience_s)
        place = streams.place_of(asked, device)
        queue = GatherQueue(manifest, asked.bucket_bytes, wait_s, place)
        found, _ = streams.open_stream(manifest, asked, device, queue.take, queue.close)
        model.versions.feeds[asked.id] = queue
    else:
        found, _ = streams.open_stream(manifest, asked, device, streams.from_file(manifest))
    return found


def gather(
    model: TrainedModel, stream_ids: Collection[str], everywhere: bool, dtype: torch.dtype
) -> None:
    """Gather the sharded weights of a model once for all these streams.

    Each rank queues them for its own streams. Without `everywhere`, only rank 0 has any.
    """
    feeds = model.versions.feeds
    queues = [feeds.pop(stream_id) for stream_id in stream_ids if stream_id in feeds]
    device = queues[0].device if queues else model.network.device
    for name, tensor in model.state.tensors("weights", dtype, device, everywhere):
        if tensor is not None:
            for _, stored in model.network.stored_form.cut(name, tensor):
                for queue in queues:
                    queue.put(stored)
