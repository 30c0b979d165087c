"""The newest statistics of vLLM's scheduler."""

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from skyrl_actors.engines.deadlines import PausableDeadlines


class LastStats(StatLoggerBase):
    """A stat logger and its own factory: vLLM calls it once for each engine core, here one.

    It counts vLLM's steps in `deadlines`.
    """

    def __init__(self, deadlines: PausableDeadlines) -> None:
        self._deadlines = deadlines
        self.waiting = 0
        self.kv_usage = 0.0
        self.prefix_queries = 0
        self.prefix_hits = 0

    def __call__(self, vllm_config: Any, engine_index: int = 0) -> "LastStats":
        return self

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        self._deadlines.steps += 1
        if scheduler_stats is not None:
            self.waiting = (
                scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            )
            self.kv_usage = scheduler_stats.kv_cache_usage
            self.prefix_queries += scheduler_stats.prefix_cache_stats.queries
            self.prefix_hits += scheduler_stats.prefix_cache_stats.hits

    def log_engine_initialized(self) -> None:
        pass
