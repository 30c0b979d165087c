"""Numbers of this process into Ray's metrics, from where its agents hand them to Prometheus."""

from ray.util.metrics import Counter, Gauge

from skyrl_actors.observe.counts import Counts, Tags
from skyrl_actors.observe.metrics import PREFIX, REGISTRY


class Exporter:
    """A gauge is what it was last set to; a counter is told by how much it grew since it was last asked."""

    def __init__(self, service: str):
        self._service = service
        made = {
            m.name: (Gauge if m.kind == "gauge" else Counter)(f"{PREFIX}{m.name}", m.description, ("service", *m.tags))
            for m in REGISTRY.values()
        }
        self._gauges = {name: metric for name, metric in made.items() if isinstance(metric, Gauge)}
        self._counters = {name: metric for name, metric in made.items() if isinstance(metric, Counter)}
        self._told: dict[tuple[str, Tags], float] = {}

    def set(self, name: str, value: float, **tags: str) -> None:
        self._gauges[name].set(value, {"service": self._service, **tags})

    def total(self, name: str, value: float, **tags: str) -> None:
        """A counter's value by now."""
        key = name, tuple(sorted(tags.items()))
        grown = value - self._told.get(key, 0.0)
        if grown > 0:
            self._counters[name].inc(grown, {"service": self._service, **tags})
            self._told[key] = value

    def totals(self, counts: Counts) -> None:
        for (name, tags), value in counts.read().items():
            self.total(name, value, **dict(tags))
