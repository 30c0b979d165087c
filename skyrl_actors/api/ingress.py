"""The Ray Serve deployment: stateless replicas of the HTTP application in front of the controller actor."""

from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.schema import LoggingConfig

from skyrl_actors.api.app import build_app
from skyrl_actors.api.client import ControllerClient, find_controller
from skyrl_actors.api.state import ApiState
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.observe.process import Observed


@serve.deployment(
    name="tinker-api",
    max_ongoing_requests=4000,
    ray_actor_options={"num_cpus": 0},
    # Replicas hold nothing: a client whose long poll is cut asks again.
    graceful_shutdown_wait_loop_s=0.2,
    graceful_shutdown_timeout_s=2.0,
    health_check_period_s=1.0,
    health_check_timeout_s=30.0,
    logging_config=LoggingConfig(enable_access_log=False),  # a line for each poll would cost more than the poll
)
@serve.ingress()
class TinkerApi:
    def __init__(self, config: ClusterConfig):
        Observed(config.name, config.observe.otlp, config.observe.log_format).begin("ingress")
        self.state = ApiState(config, ControllerClient(find_controller(config.name)))

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve in the replica, after the constructor."""
        return build_app(self.state)


def build(arguments: dict[str, Any]) -> serve.Application:
    """For `serve deploy`: arguments are {"config": path, "overrides": [...]}; starts the controller where there is none."""
    from skyrl_actors.commands.serve import deployed_application

    return deployed_application(arguments)
