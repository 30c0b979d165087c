"""The present values of a service's metrics, as Prometheus reads them from `/metrics`."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from skyrl_actors.observe.metrics import PREFIX, REGISTRY

Tags = tuple[tuple[str, str], ...]  # sorted
Key = tuple[str, Tags]  # of a metric without the prefix


class Exposition:
    """The values that this process has exported, by metric and tags with the service's name."""

    def __init__(self) -> None:
        self._values: dict[Key, float] = {}

    def set(self, name: str, value: float, tags: Mapping[str, str]) -> None:
        self._values[name, tuple(sorted(tags.items()))] = value

    def add(self, name: str, growth: float, tags: Mapping[str, str]) -> None:
        key = name, tuple(sorted(tags.items()))
        self._values[key] = self._values.get(key, 0.0) + growth

    def forget_gauges(self, service: str) -> None:
        """Remove the gauges of a service whose parts have ended. Its counters stay."""
        for key in [key for key in self._values if REGISTRY[key[0]].kind == "gauge"]:
            if ("service", service) in key[1]:
                del self._values[key]

    def text(self, service: str, fresh: Mapping[Key, float], sees: Callable[[str], bool]) -> str:
        """Return all values in the text format of Prometheus.

        `fresh`: values newer than the last export, by metric and tags without the service. `sees`:
        whether values of this tenant are returned.
        """
        values = self._values | {
            (name, tuple(sorted((*tags, ("service", service))))): value
            for (name, tags), value in fresh.items()
        }
        registry = CollectorRegistry()
        registry.register(
            _Values(
                {
                    (name, tags): value
                    for (name, tags), value in values.items()
                    if "tenant" not in (of := dict(tags)) or sees(of["tenant"])
                }
            )
        )
        return generate_latest(registry).decode()


class _Values(Collector):
    def __init__(self, values: Mapping[Key, float]):
        self._values = values

    def collect(self) -> Iterable[Metric]:
        by_name: dict[str, list[tuple[Tags, float]]] = {}
        for (name, tags), value in self._values.items():
            by_name.setdefault(name, []).append((tags, value))
        return self._families(by_name)

    @staticmethod
    def _families(by_name: Mapping[str, list[tuple[Tags, float]]]) -> Iterator[Metric]:
        for metric in REGISTRY.values():
            labels = sorted(("service", *metric.tags))
            kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
            family = kind(f"{PREFIX}{metric.name}", metric.description, labels=labels)
            for tags, value in by_name.get(metric.name, []):
                family.add_metric([text for _, text in tags], value)
            if metric.name in by_name:
                yield family


EXPOSED = Exposition()
"""The values of this process."""
