"""Join the answers of several shards to one (pure). Answers are by the number of the shard."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from skyrl_actors.api.shard_status import joined
from skyrl_actors.messages.catalog import SessionEntry
from skyrl_actors.messages.keys import ACCESSES, Act, AuditEntry
from skyrl_actors.messages.operating import FailedRequest, HistoryPoint, OpenRequest
from skyrl_actors.messages.paths import shard_of
from skyrl_actors.observe.spans import Span

Arguments = Sequence[Any]
MINUTE_S = 60.0
OF_ALL: tuple[Act, ...] = ("pause", "drain", "resume")  # acts that each shard records
SAME_ACT_S = 5.0


def first(found: Mapping[int, Any], _: Arguments) -> Any:
    """Return the answer of the first shard."""
    return found[min(found)]


def concatenated(found: Mapping[int, list[Any]], _: Arguments) -> list[Any]:
    """Return all items, in the order of the shards."""
    return [item for number in sorted(found) for item in found[number]]


def union(found: Mapping[int, dict[str, str]], _: Arguments) -> dict[str, str]:
    """Return all entries."""
    return {key: value for number in sorted(found) for key, value in found[number].items()}


def sessions(found: Mapping[int, list[SessionEntry]], _: Arguments) -> list[SessionEntry]:
    """Return all sessions, newest first.

    Every shard lists the records of all sessions, but only the session's own shard knows whether
    it is active.
    """
    chosen: dict[str, SessionEntry] = {}
    for number, entries in found.items():
        for entry in entries:
            session_id = entry.note.session_id
            if session_id not in chosen or shard_of(session_id) == number:
                chosen[session_id] = entry
    return sorted(
        chosen.values(),
        key=lambda entry: (entry.note.created_at, entry.note.session_id),
        reverse=True,
    )


def oldest_requests(
    found: Mapping[int, list[OpenRequest]], arguments: Arguments
) -> list[OpenRequest]:
    """Return the oldest open requests of all shards."""
    ordered = sorted(concatenated(found, arguments), key=lambda one: -one.age_s)
    return ordered[: arguments[1]]


def newest_failures(
    found: Mapping[int, list[FailedRequest]], arguments: Arguments
) -> list[FailedRequest]:
    """Return the newest failures of all shards."""
    ordered = sorted(concatenated(found, arguments), key=lambda one: -one.at)
    return ordered[: arguments[1]]


def newest_acts(found: Mapping[int, list[AuditEntry]], arguments: Arguments) -> list[AuditEntry]:
    """Return the newest acts of both kinds, oldest first. An act on all shards is one entry."""
    numbered = [(act, number) for number, acts in found.items() for act in acts]
    acts: list[AuditEntry] = []
    recent: list[tuple[AuditEntry, set[int]]] = []  # acts on all, with the shards that told them
    for act, number in sorted(numbered, key=lambda one: one[0].at):
        recent = [one for one in recent if act.at - one[0].at < SAME_ACT_S]
        same = [
            told
            for one, told in recent
            if (one.act, one.actor) == (act.act, act.actor) and number not in told
        ]
        if same:
            same[0].add(number)
            continue
        acts.append(act)
        if act.act in OF_ALL:
            recent.append((act, {number}))
    accesses = [one for one in acts if one.act in ACCESSES][-arguments[0] :]
    others = [one for one in acts if one.act not in ACCESSES][-arguments[0] :]
    return sorted((*accesses, *others), key=lambda one: one.at)


def history(found: Mapping[int, list[HistoryPoint]], _: Arguments) -> list[HistoryPoint]:
    """Add up the totals of each minute, oldest first.

    A shard counts with its last point before that. Before its first one it counts with this, so
    that what it did before the first minute is not taken for what it did within a minute.
    """
    left = {number: deque(points) for number, points in found.items()}
    last = {number: points[0] for number, points in found.items() if points}
    summed: list[HistoryPoint] = []
    minutes = {int(point.at // MINUTE_S) for points in left.values() for point in points}
    for minute in sorted(minutes):
        for number, points in left.items():
            while points and points[0].at // MINUTE_S <= minute:
                last[number] = points.popleft()
        summed.append(_sum(list(last.values()), minute))
    return summed


def _sum(points: Sequence[HistoryPoint], minute: int) -> HistoryPoint:
    return HistoryPoint(
        at=max(point.at for point in points if point.at // MINUTE_S <= minute),
        trained_tokens=sum(point.trained_tokens for point in points),
        sampled_tokens=sum(point.sampled_tokens for point in points),
        failed=sum(point.failed for point in points),
        open_requests=sum(point.open_requests for point in points),
    )


def metrics(found: Mapping[int, str], _: Arguments) -> str:
    """Join texts in the format of Prometheus, in which a metric must not occur twice.

    Their series differ in the label `service`.
    """
    parts: dict[str, tuple[list[str], list[str]]] = {}  # comments and series of each metric
    for number in sorted(found):
        for name, comments, series in _families(found[number]):
            parts.setdefault(name, (comments, []))[1].extend(series)
    return "".join(f"{line}\n" for own in parts.values() for lines in own for line in lines)


def _families(text: str) -> list[tuple[str, list[str], list[str]]]:
    """Return the name, the comments and the series of each metric in a text."""
    found: list[tuple[str, list[str], list[str]]] = []
    for line in text.splitlines():
        if line.startswith("# HELP "):
            found.append((line.split(" ", 3)[2], [line], []))
        elif line.startswith("#"):
            found[-1][1].append(line)
        elif line:
            found[-1][2].append(line)
    return found


def status(found: Mapping[int, dict[str, Any]], _: Arguments) -> dict[str, Any]:
    """Return the status of the service."""
    return joined(found)


def spans(found: Mapping[int, list[Span]], _: Arguments) -> list[Span]:
    """Return recent spans of all shards, oldest first. Their rows name the shard."""
    named = [
        replace(span, row=f"shard {number}: {span.row}")
        for number, own in found.items()
        for span in own
    ]
    return sorted(named, key=lambda span: span.began)
