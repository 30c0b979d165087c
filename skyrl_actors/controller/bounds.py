"""Build the controller's bounded tables from the limits of the config (pure)."""

from skyrl_actors.config.limits import LimitsConfig
from skyrl_actors.controller.payloads import PayloadMemory
from skyrl_actors.controller.queue import RequestQueue
from skyrl_actors.controller.shares import Shares
from skyrl_actors.controller.waiters import ResultTable

ALWAYS_OPEN = 16  # open requests that each key may have, whatever other keys have


def queue_of(limits: LimitsConfig) -> RequestQueue:
    """Return an empty queue that bounds open requests and their bytes."""
    requests = Shares(
        limit=limits.open_requests, per_key=limits.open_requests_per_key, floor=ALWAYS_OPEN
    )
    payload_bytes = Shares(
        limit=limits.queued_bytes, per_key=limits.queued_bytes, floor=limits.body_bytes
    )
    return RequestQueue(requests, payload_bytes)


def results_of(limits: LimitsConfig) -> ResultTable:
    """Return an empty table that bounds answers in memory by age and bytes."""
    return ResultTable(limits.result_ttl_s, limits.result_memory_bytes)


def payloads_of(limits: LimitsConfig) -> PayloadMemory:
    """Return the object that bounds the bytes of payloads in memory."""
    return PayloadMemory(limits.payload_memory_bytes)
