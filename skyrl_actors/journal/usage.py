"""What sessions used in each hour: rows that are added to with each answer."""

from collections.abc import Iterable
from dataclasses import asdict
from operator import add, attrgetter
from typing import Any

import sqlalchemy as sa

from skyrl_actors.journal import tables as t
from skyrl_actors.messages.usage import COUNTED, DAY_S, Usage

KEPT_S = 400 * DAY_S
_KEY = ("hour", "owner", "session_id", "base_model")
_COLUMNS = (*_KEY, *COUNTED)
_key_of, _counts_of = attrgetter(*_KEY), attrgetter(*COUNTED)
ADD = sa.text(
    f"INSERT INTO usage_hours ({', '.join(_COLUMNS)}) "
    f"VALUES ({', '.join(f':{name}' for name in _COLUMNS)}) "
    f"ON CONFLICT ({', '.join(_KEY)}) DO UPDATE SET "
    + ", ".join(f"{name} = usage_hours.{name} + :{name}" for name in COUNTED)
)


def added_up(parts: Iterable[Usage]) -> list[dict[str, Any]]:
    """Return one row for each hour, owner, session and base model."""
    return [asdict(total) for total in totals(parts)]


def totals(parts: Iterable[Usage]) -> list[Usage]:
    """Add up the parts of the same hour, owner, session and base model."""
    found: dict[tuple[Any, ...], tuple[int, ...]] = {}
    for part in parts:
        key, counts = _key_of(part), _counts_of(part)
        known = found.get(key)
        found[key] = counts if known is None else tuple(map(add, known, counts))
    return [
        Usage(**dict(zip(_KEY, key, strict=True)), **dict(zip(COUNTED, counts, strict=True)))
        for key, counts in found.items()
    ]


def read(engine: sa.Engine, since: float, until: float, owner: str | None) -> list[Usage]:
    """Return the usage of hours that begin from `since` to before `until`, oldest first.

    `owner` None: that of all.
    """
    column = t.usage_hours.c
    query = sa.select(t.usage_hours).where(column.hour >= since, column.hour < until)
    if owner is not None:
        query = query.where(column.owner == owner)
    with engine.connect() as connection:
        rows = connection.execute(query.order_by(column.hour, column.owner, column.session_id))
        return [Usage(**row) for row in rows.mappings()]
