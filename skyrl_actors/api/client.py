"""How ingress replicas and jobs talk to the controller actor."""

from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle

from skyrl_actors.backends.base import Capabilities
from skyrl_actors.controller.tenants import Model, Sampler
from skyrl_actors.messages.errors import InternalError, InvalidRequest
from skyrl_actors.messages.model import ModelSpec
from skyrl_actors.messages.paths import TinkerPath
from skyrl_actors.messages.requests import Request
from skyrl_actors.messages.results import Failure, Result
from skyrl_actors.remote import settled

R = TypeVar("R")
POLL_S = 30.0
NAMESPACE = "skyrl-actors"


def actor_name(name: str) -> str:
    return f"{name}:controller"


def find_controller(name: str) -> ActorHandle:
    """Raises ValueError when there is none."""
    return ray.get_actor(actor_name(name), namespace=NAMESPACE)


class ControllerClient:
    def __init__(self, handle: ActorHandle):
        self.handle = handle

    async def submit(self, request: Request) -> str:
        return await settled(self.handle.submit.remote(request))

    async def retrieve(self, request_id: str, timeout_s: float) -> Result | None:
        return await settled(self.handle.retrieve.remote(request_id, timeout_s))

    async def run(self, request: Request, expected: type[R]) -> R:
        """Submit and wait."""
        return await self.result(await self.submit(request), expected)

    async def result(self, request_id: str, expected: type[R]) -> R:
        """A failure of category user is raised as InvalidRequest, any other as InternalError."""
        while True:
            result = await self.retrieve(request_id, POLL_S)
            if isinstance(result, Failure):
                raise (InvalidRequest if result.category == "user" else InternalError)(result.message)
            if result is not None:
                assert isinstance(result, expected), f"{type(result).__name__} instead of {expected.__name__}"
                return result

    async def capabilities(self) -> Capabilities:
        return await settled(self.handle.get_capabilities.remote())

    async def create_session(self, user_metadata: dict[str, str]) -> str:
        return await settled(self.handle.create_session.remote(user_metadata))

    async def heartbeat(self, session_id: str) -> None:
        await settled(self.handle.heartbeat.remote(session_id))

    async def finish_session(self, session_id: str) -> None:
        await settled(self.handle.finish_session.remote(session_id))

    async def open_sampler(self, sampler_id: str, session_id: str | None, base_model: str | None, path: str | None) -> Sampler:
        return await settled(self.handle.open_sampler.remote(sampler_id, session_id, base_model, path))

    async def get_sampler(self, sampler_id: str) -> Sampler:
        return await settled(self.handle.get_sampler.remote(sampler_id))

    async def get_model(self, model_id: str) -> Model:
        return await settled(self.handle.get_model.remote(model_id))

    async def checkpoint_spec(self, path: TinkerPath) -> ModelSpec:
        return await settled(self.handle.checkpoint_spec.remote(path))

    async def fault(self) -> str | None:
        return await settled(self.handle.fault.remote())

    async def status(self) -> dict[str, Any]:
        return await settled(self.handle.status.remote())
