"""Tensors that are gathered on one thread and sent on another."""

import threading
import time

import pytest
import torch

from skyrl_actors.messages.weights import TensorEntry, WeightManifest, buckets
from skyrl_actors.workers.feed import Feed

SIZES = (100, 40, 60, 300, 20, 20, 80)  # bytes, of which 120 travel together
ENTRIES = tuple(TensorEntry(str(i), (size // 4,), "float32", sum(SIZES[:i]), size) for i, size in enumerate(SIZES))
MANIFEST = WeightManifest("m@1", "full", "not written", sum(SIZES), ENTRIES)
TENSORS = [torch.full((size // 4,), float(i)) for i, size in enumerate(SIZES)]


def test_all_arrive_in_order_and_few_wait():
    feed, waiting = Feed(MANIFEST, 120, 10.0), []

    def gather() -> None:
        for tensor in TENSORS:
            feed.put(tensor)
            waiting.append(sum(t.nbytes for t in feed._gathered))

    gathering = threading.Thread(target=gather)
    gathering.start()
    time.sleep(0.05)
    assert gathering.is_alive() and sum(waiting) > 0  # it waits for who sends
    taken = [feed.take(wanted) for wanted in buckets(list(SIZES), 120)]
    gathering.join(10)
    assert torch.equal(torch.cat(taken).view(torch.float32), torch.cat(TENSORS))
    assert max(waiting) < 120 + max(SIZES)  # never more than a bucket and a tensor


def test_who_gathers_goes_on_when_nobody_sends():
    feed = Feed(MANIFEST, 120, 0.05)
    started = time.monotonic()
    for tensor in TENSORS:
        feed.put(tensor)
    assert time.monotonic() - started < 5  # its patience once, not for every tensor
    with pytest.raises(RuntimeError, match="did not gather m@1"):
        for wanted in buckets(list(SIZES), 120):
            feed.take(wanted)


def test_who_sends_hears_that_nobody_gathers():
    feed = Feed(MANIFEST, 120, 10.0)
    threading.Timer(0.05, feed.close).start()
    with pytest.raises(RuntimeError, match="did not gather m@1"):
        feed.take(range(1))
