"""Show the status of a service as tables."""

from typing import Any

from rich.markup import escape

from skyrl_actors.commands.terminal import console, show_rows


def show_status(content: dict[str, Any]) -> None:
    """Print a headline if requests are not served, and the tables of a status."""
    fault, warning = content.get("fault"), content.get("warning")
    if fault is not None:
        console.print(f"[bold red]NOT SERVING: {escape(fault)}[/bold red]")
    if warning is not None:
        console.print(f"[yellow]{escape(warning)}[/yellow]")
    console.print(
        f"[bold]{content['name']}[/bold]  {content.get('mode', '')}  up "
        f"{content['uptime_s']:.0f} s  phase {content.get('phase', 'starting')}  "
        f"at {content['url']}  sessions {content['sessions']}  "
        f"samplers {content['samplers']}  open requests {content['open_requests']}"
    )
    if "standby" in content:
        console.print(f"controller {content['process']}  standby {content['standby'] or 'none'}")
    show_rows("shards", content.get("shards", []))
    bases: dict[str, dict[str, Any]] = content.get("base_models", {})
    if bases:
        show_rows("base models", [{"name": name, **_plain(base)} for name, base in bases.items()])
    show_rows("models", content["models"])
    show_rows("groups", [_row_of(*item) for item in content.get("groups", {}).items()])
    show_rows("engines", content.get("engines", []))
    show_rows(
        "queued requests", [{"model_id": m, "requests": n} for m, n in content["queued"].items()]
    )


def _plain(base: dict[str, Any]) -> dict[str, Any]:
    """Return a base model's row, with the seconds of its last moves in one column."""
    moves: dict[str, float] = base.get("move_seconds") or {}
    return {**base, "move_seconds": ", ".join(f"{k} {v:g}" for k, v in moves.items())}


def _row_of(role: str, group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's row, with what its ranks compute with in one column."""
    paths: dict[str, str] = group.get("paths") or {}
    return {"role": role, **group, "paths": ", ".join(f"{k}: {v}" for k, v in paths.items())}
