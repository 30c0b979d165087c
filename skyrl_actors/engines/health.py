"""The health of one engine as a state machine (pure).

STARTING ─started─► STALE ─right weights─► HEALTHY ─drain─► DRAINING;  DEAD ─again─► STARTING;  any ─died─► DEAD

Only a HEALTHY engine is routed to. A restarted one is STALE until it holds the weights it is wanted for. A DRAINING one answers
what it has and takes nothing new.
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
    """Raises ValueError for a step that can not be."""
    if (health, event) not in NEXT:
        raise ValueError(f"a {health} engine can not be {event}")
    return NEXT[health, event]
