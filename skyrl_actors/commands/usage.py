"""`key limit` and `usage`: what API keys may use, and what they used."""

import csv
import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any, Literal

from skyrl_actors.commands.asking import actor, asked
from skyrl_actors.commands.terminal import console, show_rows
from skyrl_actors.controller.calls import ControllerCalls
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.messages.usage import ALL_KEYS, COUNTED, DAY_S, OwnerQuota, Quota, Usage

By = Literal["day", "hour", "session"]
FORMATS = {"day": "%Y-%m-%d", "hour": "%Y-%m-%d %H:00", "session": "%Y-%m-%d"}
DEFAULT_DAYS = 7


def limit(which: str, given: Mapping[str, str | float], as_json: bool, service: str) -> None:
    """Change the limits of a name, or print them if none is given."""
    values = {name: _value(name, text) for name, text in given.items()}

    async def change(calls: ControllerCalls) -> OwnerQuota | None:
        known = {quota.owner: quota for quota in await calls.list_quotas()}
        owner = ALL_KEYS if which == ALL_KEYS else await calls.owner_named(which)
        now = known[owner].quota if owner in known else Quota()
        if not values:
            return known.get(owner)
        return await calls.set_quota(which, replace(now, **values), actor())

    found = asked(service, change)
    _print([] if found is None else [found], as_json)


def _value(name: str, text: str | float) -> int | float | None:
    if not isinstance(text, str):
        return text
    if text == "none":
        return None
    if not text.replace("_", "").isdigit():
        raise ConfigError(f"{name} is {text[:40]!r}; use a whole number, or none for no limit")
    return int(text)


def limits(as_json: bool, service: str) -> None:
    """List the limits that were set."""
    _print(asked(service, lambda calls: calls.list_quotas()), as_json)


def _print(quotas: Iterable[OwnerQuota], as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(quota) for quota in quotas], indent=2))
        return
    rows = [{"name": _label(quota), **asdict(quota.quota)} for quota in quotas]
    show_rows("limits", rows)


def _label(quota: OwnerQuota) -> str:
    return "* (all others)" if quota.owner == ALL_KEYS else quota.name or quota.owner


def show(since: str | None, until: str | None, by: str, form: str, service: str) -> None:
    """Print what each key used, as a table, JSON or CSV. Raises ConfigError for wrong options."""
    if by not in FORMATS:
        raise ConfigError(f"--by is {by[:40]!r}; use {', '.join(FORMATS)}")
    today = time.time() // DAY_S * DAY_S
    last = today if until is None else _day(until, "--until")
    first = last - (DEFAULT_DAYS - 1) * DAY_S if since is None else _day(since, "--since")

    async def found(calls: ControllerCalls) -> tuple[list[Usage], dict[str, str]]:
        return await calls.usage(first, last + DAY_S, None), await calls.owner_names()

    usage, names = asked(service, found)
    rows = rows_of(usage, names, by)
    if form == "json":
        print(json.dumps(rows, indent=2))
    elif form == "csv":
        fields = ["name", "session" if by == "session" else "time", *COUNTED]
        writer = csv.DictWriter(sys.stdout, list(rows[0]) if rows else fields)
        writer.writeheader()
        writer.writerows(rows)
    else:
        show_rows("usage", rows)
        console.print("times are in UTC; tokens are those of answered requests", style="dim")


def rows_of(usage: Iterable[Usage], names: Mapping[str, str], by: str) -> list[dict[str, Any]]:
    """Add up usage by name and by day, hour or session; the oldest row is first."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for one in usage:
        at = datetime.fromtimestamp(one.hour, UTC).strftime(FORMATS[by])
        name = names.get(one.owner, one.owner) or "without a key"
        key = "session" if by == "session" else "time"
        value = (one.session_id or "-") if by == "session" else at
        empty: dict[str, Any] = {key: value, "name": name, **dict.fromkeys(COUNTED, 0)}
        row = rows.setdefault((value, name), empty)
        for field in COUNTED:
            row[field] += getattr(one, field)
    return list(rows.values())


def _day(text: str, option: str) -> float:
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise ConfigError(f"{option} is {text[:40]!r}; use a day such as 2026-11-01") from None
