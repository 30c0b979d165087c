"""Versions that a model's weights still are, written or not.

A version that was not written is read where it was trained. Before the weights change, those that somebody needs are written, and
streams that read the weights are waited for.
"""

import threading
from collections.abc import Collection
from dataclasses import dataclass, field

from skyrl_actors.workers.feed import Feed


@dataclass(slots=True)
class LiveVersions:
    paths: dict[str, str] = field(default_factory=dict)  # by version: its file
    written: set[str] = field(default_factory=set)
    readers: list[threading.Thread] = field(default_factory=list)  # each gives up at its stream's deadline
    feeds: dict[str, list[Feed]] = field(default_factory=dict)  # by version: streams whose weights are to be gathered yet

    def note(self, version: str, path: str, written: bool) -> None:
        self.paths[version] = path
        if written:
            self.written.add(version)

    def was_written(self, version: str) -> None:
        self.written.add(version)
        for feed in self.feeds.get(version, ()):
            feed.was_written()

    def unwritten(self, needless: Collection[str] = ()) -> list[str]:
        """In the order in which they were saved, which is the same on every rank."""
        return [version for version in self.paths if version not in self.written and version not in needless]

    def drop(self, path: str) -> None:
        for version in [version for version, own in self.paths.items() if own == path]:
            del self.paths[version]
            self.written.discard(version)
            self._close(version)

    def end(self) -> None:
        """The weights are about to change."""
        for version in list(self.feeds):
            self._close(version)
        for reader in self.readers:
            reader.join()
        self.readers.clear()
        self.paths.clear()
        self.written.clear()

    def _close(self, version: str) -> None:
        for feed in self.feeds.pop(version, ()):
            feed.close()
