"""Keys of earlier versions, and what replaces them.

A config that contains one is refused. docs/reference/config_changes.md lists all of them.
"""

RENAMED = {
    "transfer.freeze": "transfer.materialize=eager for always, transfer.materialize=lazy for "
    "when_needed",
}
"""What to write instead, by the key without tags of unions and without `cluster.`."""

REMOVED: dict[str, str] = {}
"""What applies now, by the same keys."""


def advice(path: tuple[str, ...]) -> str | None:
    """Return what to write instead of a key of an earlier version, or None for other keys."""
    key = ".".join(path[1:] if path[0] == "cluster" else path)
    if key.startswith("critic."):
        key = key.replace("critic.", "policy.", 1)
    if key in RENAMED:
        return f"this key was renamed; use {RENAMED[key]}"
    return f"this key was removed; {REMOVED[key]}" if key in REMOVED else None
