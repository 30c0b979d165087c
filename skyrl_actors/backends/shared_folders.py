"""Prove at start that every rank sees the folders of checkpoints and of the journal's snapshots.

Ranks write and read both. On another node, an unshared folder of the same name would take a
checkpoint that nothing can load.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.workers.interface import TrainWorker


class Ranks(Protocol):
    """The ranks of a group."""

    async def broadcast(self, method: Any, *args: Any) -> list[Any]: ...


async def prove_shared(config: ClusterConfig, groups: Mapping[str, Ranks]) -> None:
    """Write a file into each folder, and ask every rank whether it exists.

    Raises:
        ConfigError: A folder cannot be written, or a rank does not see it.
    """
    folders = {"checkpoint_dir": config.checkpoint_dir, "journal.folder": config.journal.folder}
    for key, folder in folders.items():
        probe = folder.expanduser().absolute() / f".probe-{uuid4().hex}"
        try:
            await asyncio.to_thread(_write, probe)
        except OSError as error:
            raise ConfigError(f"{key} {folder} cannot be written: {error.strerror}") from error
        try:
            for role, group in groups.items():
                _check(key, folder, role, await group.broadcast(TrainWorker.exists, str(probe)))
        finally:
            await asyncio.to_thread(probe.unlink, missing_ok=True)


def _write(probe: Path) -> None:
    probe.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    probe.touch()


def _check(key: str, folder: Path, role: str, seen: list[Any]) -> None:
    blind = [str(rank) for rank, exists in enumerate(seen) if not exists]
    if blind:
        raise ConfigError(
            f"{key} {folder} is not one folder for all nodes: {role} rank(s) {', '.join(blind)} "
            "cannot see a file that the controller wrote there; set it to storage that all nodes "
            "share"
        )
