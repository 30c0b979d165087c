"""A queue of tensors that one thread gathers and another thread sends."""

import threading
import time

import pytest
import torch

from skyrl_actors.messages.weights import TensorEntry, WeightManifest, buckets
from skyrl_actors.workers.gather_queue import GatherQueue

SIZES = (100, 40, 60, 300, 20, 20, 80)  # bytes; a bucket has 120
ENTRIES = tuple(
    TensorEntry(str(i), (size // 4,), "float32", sum(SIZES[:i]), size)
    for i, size in enumerate(SIZES)
)
MANIFEST = WeightManifest(
    version="m@1", kind="full", path="not written", num_bytes=sum(SIZES), tensors=ENTRIES
)
TENSORS = [torch.full((size // 4,), float(i)) for i, size in enumerate(SIZES)]


def test_all_tensors_arrive_in_order_and_few_are_buffered():
    queue, waiting = GatherQueue(MANIFEST, 120, 10.0), []

    def gather() -> None:
        for tensor in TENSORS:
            queue.put(tensor)
            waiting.append(sum(t.nbytes for t in queue._gathered))

    gathering = threading.Thread(target=gather)
    gathering.start()
    time.sleep(0.05)
    assert gathering.is_alive() and sum(waiting) > 0  # it waits for the sender
    taken = [queue.take(wanted) for wanted in buckets(list(SIZES), 120)]
    gathering.join(10)
    assert torch.equal(torch.cat(taken).view(torch.float32), torch.cat(TENSORS))
    assert max(waiting) < 120 + max(SIZES)  # never more than a bucket and a tensor


def test_gathering_continues_without_a_sender():
    queue = GatherQueue(MANIFEST, 120, 0.05)
    started = time.monotonic()
    for tensor in TENSORS:
        queue.put(tensor)
    assert time.monotonic() - started < 5  # it waits once, not for every tensor
    with pytest.raises(RuntimeError, match="did not gather m@1"):
        for wanted in buckets(list(SIZES), 120):
            queue.take(wanted)


def test_the_sender_fails_when_no_thread_gathers():
    queue = GatherQueue(MANIFEST, 120, 10.0)
    threading.Timer(0.05, queue.close).start()
    with pytest.raises(RuntimeError, match="did not gather m@1"):
        queue.take(range(1))
