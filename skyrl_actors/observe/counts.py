"""Counters and gauges of this process, until the exporter reads them.

Only one event loop may add and read.
"""

from collections.abc import Callable, Collection

from skyrl_actors.observe.metrics import REGISTRY

Tags = tuple[tuple[str, str], ...]


class Counts:
    """The totals of registered counters, and functions that read registered gauges."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, Tags], float] = {}
        self._levels: dict[str, Callable[[], float]] = {}
        self._checked: set[tuple[str, ...]] = set()  # counters with the names of their tags

    def add(self, metric: str, value: float = 1.0, **tags: str) -> None:
        """Add to a counter.

        Raises:
            KeyError: The registry has no such counter, or its tags differ.
        """
        if (named := (metric, *tags)) not in self._checked:
            _check(metric, tags)
            self._checked.add(named)
        key = metric, tuple(sorted(tags.items()))
        self._totals[key] = self._totals.get(key, 0.0) + value

    def read(self) -> dict[tuple[str, Tags], float]:
        """Return the totals by metric and tags."""
        return dict(self._totals)

    def watch(self, metric: str, level: Callable[[], float]) -> None:
        """Register a function that returns the value of a gauge. It is called at each export.

        Raises:
            KeyError: The registry has no such gauge without tags.
        """
        if REGISTRY[metric].kind != "gauge" or REGISTRY[metric].tags:
            raise KeyError(f"{metric} is not a gauge without tags")
        self._levels[metric] = level

    def levels(self) -> dict[str, float]:
        """Return the present values of all gauges."""
        return {metric: level() for metric, level in self._levels.items()}


def _check(metric: str, tags: Collection[str]) -> None:
    known = REGISTRY[metric]
    if set(tags) != set(known.tags) or known.kind != "counter":
        raise KeyError(
            f"{metric} was counted with the tags {', '.join(tags) or 'none'}; the registry has "
            f"a {known.kind} with the tags {', '.join(known.tags) or 'none'}"
        )


COUNTS = Counts()
"""The counts of this process."""
