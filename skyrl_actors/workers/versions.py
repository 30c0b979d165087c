"""Published versions that still equal a model's live weights, written or not.

An unwritten version is read directly from the weights. Before the weights change, versions in use
are written, and streams that read the weights are awaited.
"""

import threading
from collections.abc import Collection
from dataclasses import dataclass, field

from skyrl_actors.messages.errors import CollectiveFailed
from skyrl_actors.workers.gather_queue import GatherQueue


@dataclass(slots=True, kw_only=True)
class LiveVersions:
    """The live versions of one model, and their readers."""

    paths: dict[str, str] = field(default_factory=dict[str, str])  # file by version
    written: set[str] = field(default_factory=set[str])
    readers: list[threading.Thread] = field(default_factory=list[threading.Thread])
    # By stream id. The rank's next verb gathers their weights.
    feeds: dict[str, GatherQueue] = field(default_factory=dict[str, GatherQueue])

    def note(self, version: str, path: str, written: bool) -> None:
        """Add a version that equals the weights."""
        self.paths[version] = path
        if written:
            self.written.add(version)

    def read_by(self, reader: threading.Thread) -> None:
        """Add a reader, and drop those that ended.

        Samplers can load versions without limit between two steps.
        """
        self.readers = [*(each for each in self.readers if each.is_alive()), reader]

    def unwritten(self, needless: Collection[str] = ()) -> list[str]:
        """Return the unwritten versions in the order of creation, which is equal on every rank."""
        return [
            version
            for version in self.paths
            if version not in self.written and version not in needless
        ]

    def lives_only_as(self, path: str) -> bool:
        """Return whether this file is unwritten, so that only the live weights have its version."""
        return any(
            own == path and version not in self.written for version, own in self.paths.items()
        )

    def drop(self, path: str) -> None:
        """Drop the version of this file."""
        for version in [version for version, own in self.paths.items() if own == path]:
            del self.paths[version]
            self.written.discard(version)

    def end(self, patience_s: float) -> None:
        """Wait for all readers and drop all versions, because the weights are about to change.

        Raises CollectiveFailed when a stream still reads after `patience_s`. Its thread then hangs
        in this process, which must restart.
        """
        for queue in self.feeds.values():
            queue.close()
        for reader in self.readers:
            reader.join(patience_s)
            if reader.is_alive():
                raise CollectiveFailed(
                    f"{reader.name} still reads the weights after {patience_s:.0f} s"
                )
        self.feeds.clear()
        self.readers.clear()
        self.paths.clear()
        self.written.clear()
