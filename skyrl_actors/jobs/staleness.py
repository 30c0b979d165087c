"""Bound the staleness of episodes without discarding any (pure).

A window decides which groups of episodes may begin and which groups form the next batch. Versions
of the weights count iterations. A group that begins with version v must be trained on, at the
latest, by the iteration that begins with version v + bound. Two rules ensure this:

- A group begins only if all open groups fit into the batches until then.
- A batch is complete only if the groups that stay open can still be trained on in time, with
  `prompts` groups in each iteration.

AReaL (Fu et al., 2025) only bounds which groups begin. A slow episode can then exceed the bound.
"""

from collections.abc import Iterable


class Window:
    """The open groups of a stream of episodes."""

    def __init__(self, prompts: int, bound: int, version: int, last_version: int):
        """Create an empty window.

        Args:
            prompts: Groups in a batch.
            bound: Maximal staleness, in iterations.
            version: Number of batches taken so far.
            last_version: Number of batches of the whole run. A group begins only if an iteration
                is left for it.
        """
        self.prompts = prompts
        self.bound = bound
        self.version = version
        self.last_version = last_version
        self._began: dict[int, int] = {}
        self._finished: set[int] = set()

    @property
    def open(self) -> list[int]:
        """The sorted numbers of groups that have begun and were not taken or dropped."""
        return sorted(self._began)

    @property
    def num_finished(self) -> int:
        return len(self._finished)

    def may_begin(self, weights: int) -> bool:
        """Return whether a group may begin with this version of the weights.

        While an iteration trains, the version is one less than the number of batches taken.
        """
        batches = min(weights + self.bound + 1, self.last_version) - self.version
        return len(self._began) < self.prompts * batches

    def began(self, group: int, weights: int) -> None:
        """Record that a group began with this version of the weights."""
        self._began[group] = weights

    def finished(self, group: int) -> None:
        """Record that all episodes of a group are finished."""
        self._finished.add(group)

    def dropped(self, group: int) -> None:
        """Remove a group that is not trained on. Another group may begin in its place."""
        self._began.pop(group)
        self._finished.discard(group)

    def take(self, with_fewer: bool = False) -> list[int] | None:
        """Take the next batch, oldest groups first, and increment the version.

        The result is None while the batch is incomplete. `with_fewer` accepts a smaller batch.
        """
        ready = sorted(self._finished, key=lambda group: (self._began[group], group))[
            : self.prompts
        ]
        if len(ready) < self.prompts and not with_fewer:
            return None
        if not self._in_time(self._began.keys() - ready):
            return None
        for group in ready:
            self.dropped(group)
        self.version += 1
        return ready

    def _in_time(self, rest: Iterable[int]) -> bool:
        began = [self._began[group] for group in rest]
        return all(
            sum(start + self.bound <= last for start in began)
            <= self.prompts * (last - self.version)
            for last in range(self.version, self.version + self.bound + 1)
        )
