"""What a process has counted so far, kept where it happens and read by who exports it. One event loop adds and reads."""

from collections.abc import Callable

from skyrl_actors.observe.metrics import REGISTRY

Tags = tuple[tuple[str, str], ...]


class Counts:
    def __init__(self) -> None:
        self._totals: dict[tuple[str, Tags], float] = {}
        self._levels: dict[str, Callable[[], float]] = {}

    def add(self, metric: str, value: float = 1.0, **tags: str) -> None:
        """Raises KeyError for a metric, or tags, that the registry does not have."""
        if set(tags) != set(REGISTRY[metric].tags) or REGISTRY[metric].kind != "counter":
            raise KeyError(
                f"counter {metric} has the tags {', '.join(REGISTRY[metric].tags) or 'none'}, not {', '.join(tags) or 'none'}"
            )
        key = metric, tuple(sorted(tags.items()))
        self._totals[key] = self._totals.get(key, 0.0) + value

    def read(self) -> dict[tuple[str, Tags], float]:
        return dict(self._totals)

    def watch(self, metric: str, level: Callable[[], float]) -> None:
        """A gauge without tags that is asked for when it is exported."""
        if REGISTRY[metric].kind != "gauge" or REGISTRY[metric].tags:
            raise KeyError(f"{metric} is no gauge without tags")
        self._levels[metric] = level

    def levels(self) -> dict[str, float]:
        return {metric: level() for metric, level in self._levels.items()}


COUNTS = Counts()
"""Of this process."""
