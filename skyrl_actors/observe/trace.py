"""The phases of a service as a trace in Chrome's format, which Perfetto (ui.perfetto.dev) and chrome://tracing open (pure)."""

from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_actors.observe.spans import Span

PROCESS = 1
PHASES, MOVES = 1, 2  # the two rows
MICROSECONDS = 1e6


def events_of(service: str, timeline: Sequence[Mapping[str, Any]], until: float) -> list[dict[str, Any]]:
    """`timeline` as `status` shows it: {at, phase, seconds, moves: [(move, seconds, bytes)]}, oldest first; `until` in Unix time.

    A phase lasts from the end of its moves to the beginning of the next one's.
    """
    events: list[dict[str, Any]] = [
        _named("process_name", 0, f"skyrl-actors {service}"), _named("thread_name", PHASES, "phase"), _named("thread_name", MOVES, "moves"),
    ]  # fmt: skip
    for i, entered in enumerate(timeline):
        at = float(entered["at"])
        begun = at + float(entered["seconds"])
        ended = float(timeline[i + 1]["at"]) if i + 1 < len(timeline) else until
        events.append(_span(PHASES, str(entered["phase"]), begun, max(ended - begun, 0.0), {}))
        for move, seconds, size in entered["moves"]:
            events.append(_span(MOVES, str(move), at, float(seconds), {"to": entered["phase"], "bytes": size}))
            at += float(seconds)
    return events


def rows_of(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Lanes of models, samples, transfers. What overlaps in a row lies in lines below each other."""
    events: list[dict[str, Any]] = []
    lines: dict[str, list[tuple[int, float]]] = {}  # of a row: number, and where its last span ends
    number = MOVES
    for span in sorted(spans, key=lambda span: span.began):
        own = lines.setdefault(span.row, [])
        place = next((i for i, (_, ended) in enumerate(own) if ended <= span.began), None)
        if place is None:
            number += 1
            place = len(own)
            own.append((number, 0.0))
            events.append(_named("thread_name", number, span.row if not place else f"{span.row} ({place + 1})"))
        own[place] = own[place][0], span.began + span.seconds
        arguments = {**span.attributes, **({"request_id": span.request_id} if span.request_id else {})}
        events.append(_span(own[place][0], span.name, span.began, span.seconds, arguments))
    return events


def _span(row: int, name: str, at: float, seconds: float, arguments: dict[str, Any]) -> dict[str, Any]:
    where = {"pid": PROCESS, "tid": row, "ts": at * MICROSECONDS, "dur": seconds * MICROSECONDS}
    kinds = {PHASES: "phase", MOVES: "move"}
    return {"name": name, "cat": kinds.get(row, "span"), "ph": "X", **where, "args": arguments}


def _named(kind: str, row: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": PROCESS, "tid": row, "args": {"name": name}}
