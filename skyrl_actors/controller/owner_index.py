"""Find the entries of a folder that belong to an owner by their names, without opening files.

An entry's name is an id with "_" for ":". The part of the id before the first ":" ends in the
owner's mark.
"""

import os
import re
import threading
import time
from collections import defaultdict
from pathlib import Path

_MARKS = re.compile(r"[0-9a-f]k([0-9a-f]{10})(?=[_.]|$)")
# A folder that changed this recently may change again without a new modification time, because
# both changes can fall into one tick of the file system's clock.
UNSURE_NS = 2 * 10**9


class OwnerIndex:
    """Names of a folder's entries by owner, rebuilt when the entries change.

    A name may be listed under several owners. The caller decides by the content of the entry.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._lock = threading.Lock()
        self._at_ns = -1  # the folder's modification time when this was built; -1: rebuild
        self._all: list[str] = []
        self._of: dict[str, list[str]] = {}

    def names(self, owner: str | None) -> list[str]:
        """Return the names of an owner's entries, or of all entries for None."""
        with self._lock:
            try:
                changed_ns = self._folder.stat().st_mtime_ns
            except FileNotFoundError:
                return []
            if changed_ns != self._at_ns:
                self._build()
                self._at_ns = changed_ns if time.time_ns() - changed_ns > UNSURE_NS else -1
            return list(self._all if owner is None else self._of.get(owner, ()))

    def _build(self) -> None:
        of: defaultdict[str, list[str]] = defaultdict(list)
        self._all = os.listdir(self._folder)
        for name in self._all:
            for owner in set(_MARKS.findall(name)):
                of[owner].append(name)
        self._of = dict(of)
