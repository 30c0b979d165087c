"""Convert phases and spans to a trace in Chrome's format (pure).

Perfetto (ui.perfetto.dev) and chrome://tracing open such traces.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_actors.observe.figures import phase_periods
from skyrl_actors.observe.spans import Span

PROCESS = 1
PHASES, MOVES = 1, 2  # rows of the trace
MICROSECONDS = 1e6


def events_of(
    service: str, timeline: Sequence[Mapping[str, Any]], until: float
) -> list[dict[str, Any]]:
    """Return the events of phases and moves.

    `timeline` is the one of `status`: {at, phase, seconds, moves: [(move, seconds, bytes)]},
    oldest first. `until` is Unix time. A phase lasts from the end of its moves to the start of the
    next phase's moves.
    """
    events: list[dict[str, Any]] = [
        _named("process_name", 0, f"skyrl-actors {service}"),
        _named("thread_name", PHASES, "phase"),
        _named("thread_name", MOVES, "moves"),
    ]
    for entered, period in zip(timeline, phase_periods(timeline, until), strict=True):
        events.append(_span(PHASES, period.phase, period.begun, period.seconds, {}))
        at = period.entered
        for move, seconds, size in entered["moves"]:
            events.append(
                _span(MOVES, str(move), at, float(seconds), {"to": period.phase, "bytes": size})
            )
            at += float(seconds)
    return events


def rows_of(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return the events of spans, in one row for each model, for samples and for transfers.

    Spans that overlap are placed in further rows below.
    """
    events: list[dict[str, Any]] = []
    # For each row of the spans: the rows of the trace, as (number, end of the last span).
    lines: dict[str, list[tuple[int, float]]] = {}
    number = MOVES
    for span in sorted(spans, key=lambda span: span.began):
        own = lines.setdefault(span.row, [])
        place = next((i for i, (_, ended) in enumerate(own) if ended <= span.began), None)
        if place is None:
            number += 1
            place = len(own)
            own.append((number, 0.0))
            events.append(
                _named(
                    "thread_name", number, span.row if not place else f"{span.row} ({place + 1})"
                )
            )
        own[place] = own[place][0], span.began + span.seconds
        arguments = {
            **span.attributes,
            **({"request_id": span.request_id} if span.request_id else {}),
        }
        events.append(_span(own[place][0], span.name, span.began, span.seconds, arguments))
    return events


def _span(
    row: int, name: str, at: float, seconds: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    where = {"pid": PROCESS, "tid": row, "ts": at * MICROSECONDS, "dur": seconds * MICROSECONDS}
    kinds = {PHASES: "phase", MOVES: "move"}
    return {"name": name, "cat": kinds.get(row, "span"), "ph": "X", **where, "args": arguments}


def _named(kind: str, row: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": PROCESS, "tid": row, "args": {"name": name}}
