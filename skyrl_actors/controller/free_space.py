"""Watch the free space of journal and checkpoints: warn, then refuse one key, then all.

Answers of accepted requests must still be written. So requests are refused before the disk is full.
"""

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from skyrl_actors.config.limits import LimitsConfig
from skyrl_actors.controller.disk import Disk
from skyrl_actors.controller.housekeeping import attempt
from skyrl_actors.messages.catalog import CheckpointEntry
from skyrl_actors.messages.errors import CapacityError, Unavailable
from skyrl_actors.messages.paths import owner_of
from skyrl_actors.observe.counts import COUNTS

log = logging.getLogger(__name__)
EVERY_S = 10.0
GIB = 2**30
Level = Literal["ok", "low", "scarce", "full"]


@dataclass(frozen=True, slots=True)
class Seen:
    """Free bytes by folder, and while they are scarce the owner of most checkpoint bytes."""

    free: Mapping[str, int]
    heaviest: str


def level_of(free: int, limits: LimitsConfig) -> Level:
    """Return how little space is left (pure)."""
    if free < limits.full_free_bytes:
        return "full"
    if free < limits.scarce_free_bytes:
        return "scarce"
    return "low" if free < limits.low_free_bytes else "ok"


def heaviest(checkpoints: Iterable[CheckpointEntry]) -> str:
    """Return the API key's owner whose checkpoints have the most bytes, "" without keys (pure)."""
    total = Counter[str]()
    for checkpoint in checkpoints:
        total[owner_of(checkpoint.run_id)] += checkpoint.num_bytes
    total.pop("", None)
    return max(total, key=lambda owner: total[owner], default="")


class FreeSpace:
    """The free space of the service's folders, as it was seen last."""

    def __init__(
        self,
        places: Mapping[str, Path],
        limits: LimitsConfig,
        checkpoints: Callable[[], Iterable[CheckpointEntry]],
    ):
        self._places = places
        self._limits = limits
        self._checkpoints = checkpoints
        self._free: Mapping[str, int] = {}
        COUNTS.watch("journal_free_bytes", lambda: self._free.get("journal", -1))
        COUNTS.watch("checkpoint_free_bytes", lambda: self._free.get("checkpoints", -1))
        self._refused = ""  # the owner that is refused while space is scarce

    def check(self, owner: str) -> None:
        """Raise Unavailable if no request is accepted, CapacityError if none of this owner is."""
        if (fault := self.fault()) is not None:
            raise Unavailable(f"{fault}; nothing new is accepted")
        if owner and owner == self._refused:
            raise CapacityError(
                f"{self._described('scarce')}, and the checkpoints of this API key have the most "
                "bytes: delete some"
            )

    def fault(self) -> str | None:
        """Return why nothing is accepted, or None."""
        return self._described("full") if "full" in self._levels().values() else None

    def warning(self) -> str | None:
        """Return what an operator should know, or None."""
        for level in ("scarce", "low"):
            if level in self._levels().values():
                return self._described(level)
        return None

    def status(self) -> dict[str, Any]:
        """Return free bytes and level of each folder as JSON values."""
        levels = self._levels()
        return {
            name: {"free_bytes": free, "level": levels[name]} for name, free in self._free.items()
        }

    def _levels(self) -> dict[str, Level]:
        return {name: level_of(free, self._limits) for name, free in self._free.items()}

    def _described(self, level: Level) -> str:
        name = next(name for name, found in self._levels().items() if found == level)
        return (
            f"the disk of the {name} ({self._places[name]}) has {self._free[name] / GIB:.2f} GiB "
            f"free (limits.{level}_free_bytes)"
        )

    async def follow(self, disk: Disk) -> None:
        """Look again and again, in an endless loop."""
        while True:
            before = self.fault() or self.warning()
            seen = await attempt("the free space is not known", disk.run("upkeep", self.read))
            if seen is not None:
                self.take(seen)
            now = self.fault() or self.warning()
            if now is not None and before is None:
                log.warning("%s", now)
            await asyncio.sleep(EVERY_S)

    def take(self, seen: Seen) -> None:
        """Decide by this from now on."""
        self._free, self._refused = seen.free, seen.heaviest

    def read(self) -> Seen:
        """Read the free space of all folders. Lists checkpoints only while space is scarce."""
        free = {
            name: shutil.disk_usage(_existing(path)).free for name, path in self._places.items()
        }
        is_scarce = any(level_of(one, self._limits) == "scarce" for one in free.values())
        return Seen(free, heaviest(self._checkpoints()) if is_scarce else "")


def _existing(path: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    path = path.expanduser().resolve()
    return next(place for place in (path, *path.parents) if place.exists())
