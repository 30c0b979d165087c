"""How the parts are: host memory of each process, restarts, health. For `status`, and as metrics of the Ray dashboard."""

import asyncio
import logging
from typing import Any

import psutil
from ray.util.metrics import Gauge

from skyrl_actors.engines.pool import EnginePool
from skyrl_actors.groups.supervisor import GroupSupervisor
from skyrl_actors.messages.errors import InternalError

log = logging.getLogger(__name__)
EVERY_S = 15.0


class Vitals:
    def __init__(self, service: str, groups: list[GroupSupervisor], engines: EnginePool):
        self._service = service
        self._groups = groups
        self._engines = engines
        tags = ("service", "actor")
        self._memory = Gauge("skyrl_actors_rss_bytes", "host memory of an actor's processes, in bytes", tags)
        self._restarts = Gauge("skyrl_actors_restarts", "times a part was made anew since the controller started", tags)
        self._refused = Gauge(
            "skyrl_actors_refused_calls", "calls that the ranks refused for their input, e.g. a loss not finite", tags
        )
        self._difference = Gauge(
            "skyrl_actors_logprob_difference",
            "mean absolute difference of engine and trainer in nats a token, last comparison",
            tags,
        )
        self._of_engines = {
            "running": Gauge("skyrl_actors_engine_running", "samples that an engine was given and has not answered", tags),
            "waiting": Gauge("skyrl_actors_engine_waiting", "sequences that an engine has not begun", tags),
            "kv_usage": Gauge("skyrl_actors_engine_kv_usage", "part of an engine's KV cache in use, 0 to 1", tags),
            "prefix_hit_rate": Gauge(
                "skyrl_actors_engine_prefix_hit_rate", "part of the prompt tokens so far that the KV cache had, 0 to 1", tags
            ),
            "weight_version": Gauge(
                "skyrl_actors_engine_weight_version", "number behind the @ of the full weights an engine holds; 0 = base", tags
            ),
        }
        self._task = asyncio.create_task(self._report())

    async def read(self) -> dict[str, Any]:
        groups = {}
        for supervisor in self._groups:
            ranks = await self._rss(supervisor)
            groups[supervisor.role] = {
                "ranks": len(supervisor.builder.names), "state": supervisor.down or "up", "restarts": supervisor.restarts,
                "refused": supervisor.refused, "rss_bytes": ranks, "pids": supervisor.group.pids if supervisor.group else [],
            }  # fmt: skip
        engines = []
        for engine in self._engines.engines:
            row: dict[str, Any] = {"name": engine.name, "state": engine.health, "restarts": engine.restarts}
            if engine.health == "HEALTHY":
                try:
                    status = await engine.status()
                except InternalError as error:
                    row["state"] = str(error)
                else:
                    row |= {
                        "version": status.loaded_version, "adapters": len(status.adapters), "asleep": status.asleep,
                        "running": status.running, "waiting": status.waiting, "rss_bytes": status.rss_bytes,
                        "kv_usage": round(status.kv_usage, 4),
                        "prefix_hit_rate": round(status.prefix_hits / max(status.prefix_queries, 1), 4),
                        "weight_version": number_of(status.loaded_version),
                    }  # fmt: skip
            engines.append(row)
        return {"groups": groups, "engines": engines, "controller_rss_bytes": psutil.Process().memory_info().rss}

    @staticmethod
    async def _rss(supervisor: GroupSupervisor) -> list[int]:
        if supervisor.group is None or supervisor.down is not None:
            return []
        try:
            return await supervisor.group.vitals()
        except InternalError:
            return []

    async def _report(self) -> None:
        """A gauge is what it was last set to, so it is set at intervals."""
        while True:
            found = await self.read()
            self._set(self._memory, "controller", found["controller_rss_bytes"])
            for role, group in found["groups"].items():
                self._set(self._restarts, role, group["restarts"])
                self._set(self._refused, role, group["refused"])
                for rank, size in enumerate(group["rss_bytes"]):
                    self._set(self._memory, f"{role}[{rank}]", size)
            for engine in found["engines"]:
                self._set(self._restarts, engine["name"], engine["restarts"])
                self._set(self._memory, engine["name"], engine.get("rss_bytes", 0))
                for name, gauge in self._of_engines.items():
                    self._set(gauge, engine["name"], engine.get(name) or 0)
            if self._engines.agreement.differences:
                self._set(self._difference, "engines", self._engines.agreement.differences[-1])
            await asyncio.sleep(EVERY_S)

    def _set(self, gauge: Gauge, actor: str, value: float) -> None:
        gauge.set(value, {"service": self._service, "actor": actor})

    def close(self) -> None:
        self._task.cancel()


def number_of(version: str | None) -> int:
    """Of `<model>@<number>`; the base, and weights that were dropped, are 0."""
    number = (version or "").rpartition("@")[2]
    return int(number) if number.isdigit() else 0
