"""`trace`: write phases, lanes and transfers of a running service to a file for Perfetto."""

import json
import time
from pathlib import Path

from skyrl_actors.commands.serve import read_spans, read_status
from skyrl_actors.commands.terminal import note
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.observe.trace import events_of, rows_of


def run(name: str, target: Path) -> None:
    """Write a trace file of a service. Raises ConfigError if there is nothing to show."""
    timeline, spans = read_status(name).get("phase_timeline", []), read_spans(name)
    if not timeline and not spans:
        raise ConfigError(
            f"service {name!r} has no operations to show yet; run this command after some requests"
        )
    events = [*events_of(name, timeline, time.time()), *rows_of(spans)]
    target.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    summary = f"{len(timeline)} changes of phase, {len(spans)} operations and transfers"
    note(f"{summary} in {target.resolve()}; open it at ui.perfetto.dev or chrome://tracing")
