"""Filter the controller's status for a viewer of the console (pure).

Without configured keys a viewer sees everything. Otherwise a viewer sees totals and its own
objects.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_actors.config.keys import is_of
from skyrl_actors.messages.paths import owner_of

TO_ALL = (
    "name",
    "ready",
    "epoch",
    "uptime_s",
    "sessions",
    "samplers",
    "open_requests",
    "recoveries",
    "counts",
    "mode",
    "phase",
    "phase_seconds",
    "phase_timeline",
    "controller_rss_bytes",
    "devices",
    "logprob_differences",
    "weight_load_seconds",
)


@dataclass(frozen=True, slots=True)
class Viewer:
    """The viewer of the console.

    `all`: no keys are required, or the viewer is an admin. Otherwise `owner` is the key's owner, or
    None without a key.
    """

    all: bool
    owner: str | None = None

    def sees(self, text: str) -> bool:
        return self.all or (self.owner is not None and owner_of(text) == self.owner)

    def is_tenant(self, name: str) -> bool:
        """Return whether counts of this name are shown: a key's name, or without one its owner."""
        return self.all or (self.owner is not None and is_of(name, self.owner))

    @property
    def scope(self) -> str | None:
        """The owner whose objects are shown; None: those of all."""
        return None if self.all else self.owner

    @property
    def is_known(self) -> bool:
        return self.all or self.owner is not None


def _engine(engine: Mapping[str, Any], viewer: Viewer) -> dict[str, Any]:
    """Hide versions of other tenants, which contain ids, and errors, which may quote any id."""
    version, state = str(engine.get("version") or ""), str(engine.get("state"))
    shown = {**engine, "state": state if viewer.all or state.isupper() else "no answer"}
    if version and ":" in version and not viewer.sees(version):
        shown["version"] = "of another tenant"
    return shown


def _group(group: Mapping[str, Any], viewer: Viewer) -> dict[str, Any]:
    """Hide the reason of a fault, which may quote log lines, and the process ids."""
    shown = {key: value for key, value in group.items() if viewer.all or key != "pids"}
    return shown | ({} if viewer.all or group.get("state") == "up" else {"state": "down"})


def _base_model(base: Mapping[str, Any], viewer: Viewer) -> dict[str, Any]:
    """Hide the text of a fault, which may quote log lines."""
    fault = base.get("fault")
    return {**base, "fault": fault if viewer.all or not fault else "cannot be loaded"}


def _shard(shard: Mapping[str, Any], viewer: Viewer) -> dict[str, Any]:
    """Hide the reason of a fault, which may quote log lines, and the processes."""
    if viewer.all:
        return dict(shard)
    shown = {key: shard.get(key) for key in ("shard", "mode", "sessions", "open_requests")}
    return shown | {"fault": "away" if shard.get("fault") else None}


def visible(status: Mapping[str, Any], viewer: Viewer) -> dict[str, Any]:
    """Return the part of the controller's `status` that this viewer may see.

    `queued` is the number of all queued requests. `models` are those of the viewer.
    """
    shown = {key: status[key] for key in TO_ALL if key in status}
    models = status.get("models", [])
    queued: Mapping[str, int] = status.get("queued", {})
    tenants: Mapping[str, Any] = status.get("tenants", {})
    return {
        **shown,
        "engines": [_engine(engine, viewer) for engine in status.get("engines", [])],
        "groups": {role: _group(group, viewer) for role, group in status.get("groups", {}).items()},
        "base_models": {
            name: _base_model(base, viewer) for name, base in status.get("base_models", {}).items()
        },
        "shards": [_shard(shard, viewer) for shard in status.get("shards", [])],
        "fault": status.get("fault")
        if viewer.all or not status.get("fault")
        else "the service is recovering",
        "warning": status.get("warning") if viewer.all else None,  # it may have paths and log lines
        "queued": sum(queued.values()),
        "num_models": len(models),
        "models": [
            {**m, "queued": queued.get(m["model_id"], 0)}
            for m in models
            if viewer.sees(m["model_id"])
        ],
        "tenants": {name: counts for name, counts in tenants.items() if viewer.is_tenant(name)},
        "key": "none needed" if viewer.all else "given" if viewer.is_known else "missing",
    }
