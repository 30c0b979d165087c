"""Which entries of a folder belong to whom, by their names: nobody's files are opened for somebody else's listing.

An entry's name is an id with "_" for ":", and the part of the id before the first ":" ends in the owner's mark.
"""

import os
import re
import threading
import time
from collections import defaultdict
from pathlib import Path

_MARKS = re.compile(r"[0-9a-f]k([0-9a-f]{10})(?=[_.]|$)")
UNSURE_NS = 2 * 10**9  # a change within the clock's tick of a listing leaves the folder's time as it was


class OwnerIndex:
    """It is made again when the folder's entries change. A name may stand under several owners: what it holds tells."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._made = threading.Lock()
        self._at_ns = -1  # the folder's time of change when this was made; -1: make it again
        self._all: list[str] = []
        self._of: dict[str, list[str]] = {}

    def names(self, owner: str | None) -> list[str]:
        """`owner` None: of everybody."""
        with self._made:
            try:
                changed_ns = self._folder.stat().st_mtime_ns
            except FileNotFoundError:
                return []
            if changed_ns != self._at_ns:
                self._make()
                self._at_ns = changed_ns if time.time_ns() - changed_ns > UNSURE_NS else -1
            return list(self._all if owner is None else self._of.get(owner, ()))

    def _make(self) -> None:
        of: defaultdict[str, list[str]] = defaultdict(list)
        self._all = os.listdir(self._folder)
        for name in self._all:
            for owner in set(_MARKS.findall(name)):
                of[owner].append(name)
        self._of = dict(of)
