"""Export metrics of this process through Ray, whose agents serve them, and at `/metrics`."""

from ray.util.metrics import Counter, Gauge

from skyrl_actors.observe.counts import Counts, Tags
from skyrl_actors.observe.exposition import EXPOSED
from skyrl_actors.observe.metrics import PREFIX, REGISTRY


class Exporter:
    """Ray metrics of one service. Counters are set by their totals; the growth is exported."""

    def __init__(self, service: str):
        self._service = service
        made = {
            m.name: (Gauge if m.kind == "gauge" else Counter)(
                f"{PREFIX}{m.name}", m.description, ("service", *m.tags)
            )
            for m in REGISTRY.values()
        }
        self._gauges = {name: metric for name, metric in made.items() if isinstance(metric, Gauge)}
        self._counters = {
            name: metric for name, metric in made.items() if isinstance(metric, Counter)
        }
        self._exported: dict[tuple[str, Tags], float] = {}

    def set(self, name: str, value: float, **tags: str) -> None:
        named = {"service": self._service, **tags}
        self._gauges[name].set(value, named)
        EXPOSED.set(name, value, named)

    def total(self, name: str, value: float, **tags: str) -> None:
        """Set a counter to its current total."""
        key = name, tuple(sorted(tags.items()))
        growth = value - self._exported.get(key, 0.0)
        if growth > 0:
            named = {"service": self._service, **tags}
            self._counters[name].inc(growth, named)
            EXPOSED.add(name, growth, named)
            self._exported[key] = value

    def totals(self, counts: Counts) -> None:
        for (name, tags), value in counts.read().items():
            self.total(name, value, **dict(tags))

    def close(self) -> None:
        """Export no gauges of this service at `/metrics` any more."""
        EXPOSED.forget_gauges(self._service)
