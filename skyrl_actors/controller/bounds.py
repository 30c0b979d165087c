"""Build the controller's bounded tables from the limits of the config (pure)."""

from collections.abc import Callable

from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.limits import LimitsConfig
from skyrl_actors.controller.payloads import PayloadMemory
from skyrl_actors.controller.queue import RequestQueue
from skyrl_actors.controller.shares import Shares
from skyrl_actors.controller.waiters import ResultTable

PAYLOAD_MEMORY_BYTES = 2**30  # other payloads are read from the journal when their request runs
RESULT_MEMORY_BYTES = 256 * 2**20  # in memory, and as much on the way to clients
RESULT_TTL_S = 30.0  # in memory; the journal keeps answers longer
ALWAYS_OPEN = 16  # open requests that each key may have, whatever other keys have


def queue_of(limits: LimitsConfig, weight: Callable[[str], float] = lambda _: 1.0) -> RequestQueue:
    """Return an empty queue that bounds open requests and their bytes.

    `weight` returns the weight of an owner.
    """
    requests = Shares(limit=limits.open_requests, floor=ALWAYS_OPEN, weight=weight)
    payload_bytes = Shares(limit=limits.queued_bytes, floor=limits.body_bytes, weight=weight)
    return RequestQueue(requests, payload_bytes)


def results_of() -> ResultTable:
    """Return an empty table that bounds answers in memory by age and bytes."""
    return ResultTable(RESULT_TTL_S, RESULT_MEMORY_BYTES)


def payloads_of(config: ClusterConfig) -> PayloadMemory:
    """Return the object that bounds the bytes of payloads in memory."""
    return PayloadMemory(PAYLOAD_MEMORY_BYTES, shares=len(config.served()))
