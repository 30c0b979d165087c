"""What the console page shows to whom (pure): everything where no keys are configured, else totals and what is the viewer's own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_actors.messages.paths import owner_of

TO_ALL = (
    "name", "ready", "epoch", "uptime_s", "sessions", "samplers", "open_requests", "recoveries", "counts", "phase", "seconds_in_phase",
    "phase_timeline", "controller_rss_bytes", "logprob_differences", "weight_load_seconds",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Viewer:
    """`all`: no keys are configured. Otherwise `owner` is the holder of the key that was given; None when none was."""

    all: bool
    owner: str | None = None

    def sees(self, text: str) -> bool:
        return self.all or (self.owner is not None and owner_of(text) == self.owner)

    @property
    def is_known(self) -> bool:
        return self.all or self.owner is not None


def _engine(engine: Mapping[str, Any], viewer: Viewer) -> dict[str, Any]:
    """A version bears the id of its model, and an error may name anything."""
    version, state = str(engine.get("version") or ""), str(engine.get("state"))
    shown = {**engine, "state": state if viewer.all or state.isupper() else "no answer"}
    if version and ":" in version and not viewer.sees(version):
        shown["version"] = "of another tenant"
    return shown


def _group(group: Mapping[str, Any], viewer: Viewer) -> dict[str, Any]:
    """Why it is down, its processes' last lines may say; those of one machine have process ids."""
    shown = {key: value for key, value in group.items() if viewer.all or key != "pids"}
    return shown | ({} if viewer.all or group.get("state") == "up" else {"state": "down"})


def visible(status: Mapping[str, Any], viewer: Viewer) -> dict[str, Any]:
    """`status` as the controller answers it; `queued` is the number of all requests in line, `models` those of the viewer."""
    shown = {key: status[key] for key in TO_ALL if key in status}
    models = status.get("models", [])
    queued: Mapping[str, int] = status.get("queued", {})
    tenants: Mapping[str, Any] = status.get("tenants", {})
    return {
        **shown,
        "engines": [_engine(engine, viewer) for engine in status.get("engines", [])],
        "groups": {role: _group(group, viewer) for role, group in status.get("groups", {}).items()},
        "fault": status.get("fault") if viewer.all or not status.get("fault") else "something is being made anew",
        "queued": sum(queued.values()),
        "num_models": len(models),
        "models": [{**m, "queued": queued.get(m["model_id"], 0)} for m in models if viewer.sees(m["model_id"])],
        "tenants": {name: counts for name, counts in tenants.items() if viewer.all or name == viewer.owner},
        "key": "none needed" if viewer.all else "given" if viewer.is_known else "missing",
    }
