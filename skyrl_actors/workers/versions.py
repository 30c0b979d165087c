"""Versions that a model's weights still are, written or not.

A version that was not written is read where it was trained. Before the weights change, those that somebody needs are written, and
streams that read the weights are waited for.
"""

import threading
from collections.abc import Collection
from dataclasses import dataclass, field

from skyrl_actors.messages.errors import CollectiveFailed
from skyrl_actors.workers.feed import Feed


@dataclass(slots=True)
class LiveVersions:
    paths: dict[str, str] = field(default_factory=dict)  # by version: its file
    written: set[str] = field(default_factory=set)
    readers: list[threading.Thread] = field(default_factory=list)
    feeds: dict[str, Feed] = field(default_factory=dict)  # by the stream's id: their weights are gathered in the rank's next verb

    def note(self, version: str, path: str, written: bool) -> None:
        self.paths[version] = path
        if written:
            self.written.add(version)

    def read_by(self, reader: threading.Thread) -> None:
        """Samplers may load versions for ever without a step: those that have ended are let go."""
        self.readers = [*(each for each in self.readers if each.is_alive()), reader]

    def unwritten(self, needless: Collection[str] = ()) -> list[str]:
        """In the order in which they were saved, which is the same on every rank."""
        return [version for version in self.paths if version not in self.written and version not in needless]

    def lives_only_as(self, path: str) -> bool:
        """Whether a version that is to be written there one day is the weights still."""
        return any(own == path and version not in self.written for version, own in self.paths.items())

    def drop(self, path: str) -> None:
        for version in [version for version, own in self.paths.items() if own == path]:
            del self.paths[version]
            self.written.discard(version)

    def end(self, patience_s: float) -> None:
        """The weights are about to change. Raises CollectiveFailed when a stream still reads them after `patience_s`: then its thread
        hangs in this process, which must be made anew."""
        for feed in self.feeds.values():
            feed.close()
        for reader in self.readers:
            reader.join(patience_s)
            if reader.is_alive():
                raise CollectiveFailed(f"{reader.name} still reads the weights after {patience_s:.0f} s")
        self.feeds.clear()
        self.readers.clear()
        self.paths.clear()
        self.written.clear()
