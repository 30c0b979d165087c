"""Measure the bytes allocated by torch on the CPU, with its profiler.

This includes memory that an operation allocates internally.
"""

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], Any]) -> int:
    """Return the largest number of bytes at a time, beyond those before the call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    held = peak = 0
    events: Any = recorded.profiler
    for event in events.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
