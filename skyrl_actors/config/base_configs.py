"""The configs of a service's base models, by name."""

from collections.abc import Iterator

from skyrl_actors.config.cluster import ClusterConfig


class BaseConfigs:
    """The config of each base model. The first is the default."""

    def __init__(self, config: ClusterConfig):
        self._own = config.served()

    @property
    def default(self) -> ClusterConfig:
        return next(iter(self._own.values()))

    def of(self, base_model: str) -> ClusterConfig:
        """Return the config of a base model; that of the default for an unknown name."""
        return self._own.get(base_model, self.default)

    @property
    def samples_in_flight(self) -> int:
        """The most of any base model."""
        return max(config.samples_in_flight for config in self._own.values())

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)
