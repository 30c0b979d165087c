"""`journal`: list the operations in the journal of a service, which can be running."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from skyrl_actors.commands.terminal import console, show_rows
from skyrl_actors.config.journal import JournalConfig
from skyrl_actors.config.load import load
from skyrl_actors.config.shard_configs import shard_configs
from skyrl_actors.journal.entries import Operation, SnapshotTaken
from skyrl_actors.journal.journal import reading
from skyrl_actors.journal.loading import models
from skyrl_actors.messages.errors import NotFound
from skyrl_actors.messages.paths import shard_of


def run(
    config_path: Path, overrides: Sequence[str], model_id: str | None, last: int, as_json: bool
) -> None:
    """Print the models of a journal, or the `last` operations of one model.

    Raises NotFound if the journal does not contain `model_id`.
    """
    shards = shard_configs(load(config_path, overrides))
    if model_id is None:
        _show("models", [row for shard in shards for row in _models(shard.journal)], as_json)
        return
    number = min(shard_of(model_id), len(shards))
    with reading(shards[number - 1].journal) as store:
        operations, snapshots = store.operations(model_id, 0, 2**62), store.snapshots(model_id)
    if not operations:
        raise NotFound(
            f"the journal does not contain model {model_id!r}; run `journal` without --model to "
            "list its models"
        )
    rows = [_operation(op, snapshots) for op in operations[-last:]]
    _show(f"{model_id}: operations", rows, as_json)
    if not as_json:
        step = max(op.step or 0 for op in operations)
        console.print(
            f"a new model can start from any step: tinker://{model_id}/steps/<0 to {step}>"
        )


def _models(config: JournalConfig) -> list[dict[str, Any]]:
    with reading(config) as store:
        return models(store.engine)


def _operation(operation: Operation, snapshots: Sequence[SnapshotTaken]) -> dict[str, Any]:
    snapshot = any(s.number == operation.number for s in snapshots)
    waits = operation.answered_at is None
    return {
        "number": operation.number,
        "request": operation.kind,
        "seq": operation.seq_id,
        "step": operation.step,
        "accepted": _time(operation.accepted_at),
        "seconds": None
        if waits
        else round((operation.answered_at or 0.0) - operation.accepted_at, 3),
        "outcome": "waits" if waits else "failed" if operation.failed else "done",
        "effect": operation.effect,
        "payload bytes": operation.payload.length if operation.payload else None,
        "snapshot": "yes" if snapshot else "",
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="milliseconds")


def _show(title: str, rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    show_rows(
        title,
        [{k: _time(v) if k in ("first", "last") else v for k, v in row.items()} for row in rows],
    )
