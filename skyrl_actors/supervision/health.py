"""The health of one part, a group of ranks or an engine, as a state machine (pure).

STARTING ─started─► STALE ─ready─► HEALTHY ─drain─► DRAINING
any ─died─► DEAD ─again─► STARTING

Only a HEALTHY part gets new calls. A started part is STALE until it holds what it must serve: an
engine the wanted weights. A DRAINING part finishes its calls and accepts none.
"""

from typing import Literal

Health = Literal["STARTING", "STALE", "HEALTHY", "DRAINING", "DEAD"]
Event = Literal["started", "ready", "drain", "died", "again"]
NEXT: dict[tuple[Health, Event], Health] = {
    ("STARTING", "started"): "STALE",
    ("STALE", "ready"): "HEALTHY",
    ("STARTING", "died"): "DEAD",
    ("STALE", "died"): "DEAD",
    ("HEALTHY", "died"): "DEAD",
    ("HEALTHY", "drain"): "DRAINING",
    ("DRAINING", "died"): "DEAD",
    ("DEAD", "died"): "DEAD",
    ("DEAD", "again"): "STARTING",
}


def after(health: Health, event: Event) -> Health:
    """Return the next health. Raise ValueError for a step that the machine does not have."""
    if (health, event) not in NEXT:
        raise ValueError(f"a {health} part cannot be {event}")
    return NEXT[health, event]
