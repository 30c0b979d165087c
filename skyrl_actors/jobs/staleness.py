"""Which groups of episodes may begin, and which make the next batch, so that none is ever learned from too late (pure).

Versions of the weights count iterations: what begins with version v may be learned from by the iteration that begins with version
v + bound at the latest. A group begins only if all that are open then fit into the batches until there, and a batch is whole only if
what stays open can still be learned from in time, `prompts` groups an iteration. So nothing is thrown away for its age. (AReaL, Fu et al., 2025, bounds the beginnings; that
alone lets a slow episode grow older.)
"""

from collections.abc import Iterable


class Window:
    def __init__(self, prompts: int, bound: int, version: int, last_version: int):
        """`version`: batches taken so far. `last_version`: where the run ends; nothing begins that no iteration is left for."""
        self.prompts = prompts
        self.bound = bound
        self.version = version
        self.last_version = last_version
        self._began: dict[int, int] = {}
        self._finished: set[int] = set()

    @property
    def open(self) -> list[int]:
        """Groups that began and were not learned from, in their order."""
        return sorted(self._began)

    @property
    def num_finished(self) -> int:
        return len(self._finished)

    def may_begin(self, weights: int) -> bool:
        """With weights of that version; while an iteration learns they are one behind the batches that were taken."""
        batches = min(weights + self.bound + 1, self.last_version) - self.version
        return len(self._began) < self.prompts * batches

    def began(self, group: int, weights: int) -> None:
        self._began[group] = weights

    def finished(self, group: int) -> None:
        self._finished.add(group)

    def dropped(self, group: int) -> None:
        """It teaches nothing; another may begin in its place."""
        self._began.pop(group)
        self._finished.discard(group)

    def take(self, with_fewer: bool = False) -> list[int] | None:
        """The next batch, oldest first, and one version on; None while it must be waited for."""
        ready = sorted(self._finished, key=lambda group: (self._began[group], group))[: self.prompts]
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
            sum(start + self.bound <= last for start in began) <= self.prompts * (last - self.version)
            for last in range(self.version, self.version + self.bound + 1)
        )
