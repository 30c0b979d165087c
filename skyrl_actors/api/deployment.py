"""The Ray Serve deployment: stateless HTTP replicas in front of the controller actor."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from fastapi import FastAPI
from ray import serve
from ray.serve.schema import LoggingConfig

from skyrl_actors import heap
from skyrl_actors.api.app import build_app
from skyrl_actors.api.connect import client_of
from skyrl_actors.api.open_requests import MOST_OPEN
from skyrl_actors.api.state import ApiState
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.observe.process import Observed
from skyrl_actors.part_logs import PartLogs
from skyrl_actors.storage.private_folders import run_folder

Replica = TypeVar("Replica", bound=type)


class Deployed(Protocol):
    """A class that Serve runs in replicas."""

    def options(self, **options: Any) -> "Deployed": ...

    def bind(self, *arguments: Any) -> serve.Application: ...


class TypedServe(Protocol):
    """Functions of Ray Serve, with the types that its own annotations leave out."""

    def deployment(self, **options: Any) -> Callable[[type], Deployed]: ...

    def ingress(self) -> Callable[[Replica], Replica]: ...

    def start(self, **options: Any) -> None: ...

    def run(self, target: serve.Application, **options: Any) -> object: ...


typed_serve = cast(TypedServe, serve)


@typed_serve.deployment(
    name="tinker-api",
    max_ongoing_requests=MOST_OPEN,
    ray_actor_options={"num_cpus": 0},
    # Replicas have no state: a client whose long poll is cut repeats it.
    graceful_shutdown_wait_loop_s=0.2,
    graceful_shutdown_timeout_s=2.0,
    health_check_period_s=1.0,
    health_check_timeout_s=30.0,
    # An access log line for each poll would cost more than the poll.
    logging_config=LoggingConfig(enable_access_log=False),
)
@typed_serve.ingress()
class TinkerApi:
    """A stateless HTTP replica. It sends requests to the controller of the configured service."""

    def __init__(self, config: ClusterConfig):
        run_folder()  # the folder of HAProxy is in it, and Ray can have opened it to others
        Observed(config.name, config.observe.otlp, config.observe.log_format).begin("ingress")
        logs = PartLogs(config.name, config.shards.count)
        self.state = ApiState(config, client_of(config), logs)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application. Serve calls this in the replica, after the constructor."""
        app = build_app(self.state)
        heap.keep_present_objects()
        return app
