"""Health, restarts and memory of all parts and devices, for `status` and as metrics."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import psutil

from skyrl_actors.backends.exporter import Exporter
from skyrl_actors.colocation.phase_lock import PhaseLock
from skyrl_actors.engines.interface import EngineStatus
from skyrl_actors.engines.pool import EnginePool
from skyrl_actors.engines.replica import EngineReplica
from skyrl_actors.groups.supervisor import GroupSupervisor
from skyrl_actors.messages.device_usage import DeviceUsage
from skyrl_actors.messages.errors import InternalError
from skyrl_actors.observe.counts import COUNTS
from skyrl_actors.observe.process import resident_bytes
from skyrl_actors.workers.interface import RankUsage

log = logging.getLogger(__name__)
EVERY_S = 15.0
EXPORTERS: dict[str, Exporter] = {}  # of the counts of this process, by service
SHOWN_PHASES = 200
OF_ENGINES = ("running", "waiting", "kv_usage", "prefix_hit_rate", "weight_version")


class CountsExport:
    """Export the counters and gauges of this process every EVERY_S seconds."""

    def __init__(self, service: str):
        # Kept, because the totals of this process go on if its controller is built again.
        self._exporter = EXPORTERS.setdefault(service, Exporter(service))
        self._task = asyncio.create_task(self._report())

    async def _report(self) -> None:
        while True:
            self._exporter.set("rss_bytes", resident_bytes(psutil.Process()), actor="controller")
            for name, value in COUNTS.levels().items():
                self._exporter.set(name, value)
            self._exporter.totals(COUNTS)
            await asyncio.sleep(EVERY_S)

    def close(self) -> None:
        self._task.cancel()


class Devices:
    """The devices of all parts, each once: several parts can share one."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}  # by UUID

    def add(self, devices: Iterable[DeviceUsage]) -> None:
        for device in devices:
            self.found[device.uuid] = asdict(device)


async def _status_of(engine: EngineReplica) -> EngineStatus | str:
    """Return an engine's status, or why there is none."""
    if engine.health != "HEALTHY":
        return engine.health
    try:
        return await engine.status()
    except InternalError as error:
        return str(error)


def _group_row(supervisor: GroupSupervisor, ranks: list[RankUsage]) -> dict[str, Any]:
    return {
        "ranks": len(supervisor.builder.names),
        "state": supervisor.down or "up",
        "restarts": supervisor.restarts,
        "refused": supervisor.refused,
        "rss_bytes": [rank.rss_bytes for rank in ranks],
        "devices": list(dict.fromkeys(d.uuid for rank in ranks for d in rank.devices)),
        "paths": _paths(ranks),
        "pids": supervisor.group.pids if supervisor.group else [],
    }


def _engine_row(engine: EngineReplica, status: EngineStatus | str) -> dict[str, Any]:
    row = {"name": engine.name, "state": engine.health, "restarts": engine.restarts}
    if isinstance(status, str):
        return row | {"state": status}
    return row | {
        "version": status.loaded_version,
        "adapters": len(status.adapters),
        "asleep": status.asleep,
        "running": status.running,
        "waiting": status.waiting,
        "rss_bytes": status.rss_bytes,
        "devices": [device.uuid for device in status.devices],
        "kv_usage": round(status.kv_usage, 4),
        "prefix_hit_rate": round(status.prefix_hits / max(status.prefix_queries, 1), 4),
        "weight_version": number_of(status.loaded_version),
    }


class Monitoring:
    """Read the state of groups, engines and phases; export it every EVERY_S seconds.

    `with_counts`: also export those of this process, which has no other `Monitoring` then.
    """

    def __init__(
        self,
        service: str,
        groups: list[GroupSupervisor],
        engines: EnginePool,
        phase_lock: PhaseLock,
        with_counts: bool = True,
    ):
        self._counts = CountsExport(service) if with_counts else None
        self._groups = groups
        self._engines = engines
        self._phase_lock = phase_lock
        self._exporter = Exporter(service)
        self._task = asyncio.create_task(self._report())

    def fault(self) -> str | None:
        """Return what cannot be served now."""
        if fault := self._phase_lock.fault():
            return fault
        for supervisor in self._groups:
            if supervisor.down is not None:
                return f"the {supervisor.role} group restarts: {supervisor.down}"
        if not self._engines.healthy():
            return "; ".join(f"{e.name} is {e.health}: {e.reason}" for e in self._engines.engines)
        return None

    async def status(self) -> dict[str, Any]:
        phase_lock, engines = self._phase_lock, self._engines
        return {
            "phase": phase_lock.phase,
            "move_seconds": {name: round(s, 3) for name, s in phase_lock.move_seconds.items()},
            "move_failures": phase_lock.failures,
            "phase_seconds": {name: round(s, 3) for name, s in phase_lock.phase_seconds().items()},
            "phase_timeline": [
                asdict(entered) for entered in list(phase_lock.timeline)[-SHOWN_PHASES:]
            ],
            "weight_load_seconds": [round(s, 4) for s in engines.load_times.seconds[-20:]],
            "logprob_differences": [
                float(f"{d:.3g}") for d in list(engines.logprob_check.differences)[-20:]
            ],
            **await self.read(),
        }

    async def read(self) -> dict[str, Any]:
        """Ask all parts at the same time, because some may not answer until the deadline."""
        of_groups, of_engines = await asyncio.gather(
            asyncio.gather(*map(self._usage, self._groups)),
            asyncio.gather(*map(_status_of, self._engines.engines)),
        )
        devices, groups = Devices(), {}
        for supervisor, ranks in zip(self._groups, of_groups, strict=True):
            devices.add(device for rank in ranks for device in rank.devices)
            groups[supervisor.role] = _group_row(supervisor, ranks)
        engines: list[dict[str, Any]] = []
        for engine, status in zip(self._engines.engines, of_engines, strict=True):
            if isinstance(status, EngineStatus):
                devices.add(status.devices)
            engines.append(_engine_row(engine, status))
        return {
            "groups": groups,
            "engines": engines,
            "devices": devices.found,
            "controller_rss_bytes": resident_bytes(psutil.Process()),
        }

    @staticmethod
    async def _usage(supervisor: GroupSupervisor) -> list[RankUsage]:
        if supervisor.group is None or supervisor.down is not None:
            return []
        try:
            return await supervisor.group.usage()
        except InternalError:
            return []

    async def _report(self) -> None:
        """Export at intervals the values that have no event of their own."""
        while True:
            self._export(await self.read())
            await asyncio.sleep(EVERY_S)

    def _export(self, found: dict[str, Any]) -> None:
        export = self._exporter
        for role, group in found["groups"].items():
            export.set("restarts", group["restarts"], actor=role)
            export.set("refused_calls", group["refused"], actor=role)
            for rank, size in enumerate(group["rss_bytes"]):
                export.set("rss_bytes", size, actor=f"{role}[{rank}]")
        for uuid, device in found["devices"].items():
            export.set("device_used_bytes", device["used_bytes"], device=uuid)
            export.set("device_total_bytes", device["total_bytes"], device=uuid)
            export.set("device_utilization", device["utilization"] or 0.0, device=uuid)
        for engine in found["engines"]:
            export.set("restarts", engine["restarts"], actor=engine["name"])
            export.set("rss_bytes", engine.get("rss_bytes", 0), actor=engine["name"])
            for name in OF_ENGINES:
                export.set(f"engine_{name}", engine.get(name) or 0, actor=engine["name"])
        if self._engines.logprob_check.differences:
            export.set(
                "logprob_difference", self._engines.logprob_check.differences[-1], actor="engines"
            )
        for phase, seconds in self._phase_lock.phase_seconds().items():
            export.total("phase_seconds", seconds, phase=phase)
        for move, seconds in self._phase_lock.move_seconds.items():
            export.total("move_seconds", seconds, move=move)
            export.total("move_bytes", self._phase_lock.move_bytes.get(move, 0), move=move)
        for move, failures in self._phase_lock.failures.items():
            export.total("move_failures", failures["total"], move=move)

    def close(self) -> None:
        self._task.cancel()
        self._exporter.close()
        if self._counts is not None:
            self._counts.close()


def number_of(version: str | None) -> int:
    """Return the number of `<model>@<number>`; 0 for the base and for dropped weights."""
    number = (version or "").rpartition("@")[2]
    return int(number) if number.isdigit() else 0


def _paths(ranks: Sequence[RankUsage]) -> dict[str, str]:
    """Return what all ranks compute with; where they differ, what each uses."""
    names = dict.fromkeys(name for rank in ranks for name in rank.paths)
    return {
        name: "; ".join(dict.fromkeys(rank.paths.get(name, "") for rank in ranks)) for name in names
    }
