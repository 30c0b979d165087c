"""Bytes that torch's allocator on the CPU gave out, by its profiler: also those that an operation takes inside itself."""

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most that existed at a time, beyond what there was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    held = peak = 0
    events: Any = recorded.profiler
    for event in events.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
