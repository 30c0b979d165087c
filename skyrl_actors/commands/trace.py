"""`trace`: the phases of a running service as a file for Perfetto."""

import json
import time
from pathlib import Path

from skyrl_actors.commands.serve import read_status
from skyrl_actors.commands.terminal import note
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.observe.trace import events_of


def run(name: str, target: Path) -> None:
    timeline = read_status(name).get("phase_timeline", [])
    if not timeline:
        raise ConfigError(
            f"service {name!r} has changed no phase yet: its engines and trainers lie apart, or nothing was sampled"
        )
    target.write_text(json.dumps({"traceEvents": events_of(name, timeline, time.time()), "displayTimeUnit": "ms"}))
    note(f"{len(timeline)} changes of phase in {target.resolve()}; open it at ui.perfetto.dev or chrome://tracing")
