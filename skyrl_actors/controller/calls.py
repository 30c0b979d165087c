"""The controller's methods that ingress replicas and jobs call over RPC."""

from typing import Any, Protocol

from skyrl_actors.backends.backend import Capabilities
from skyrl_actors.controller.tenants import Model, Sampler
from skyrl_actors.messages.catalog import (
    CatalogVerb,
    CheckpointEntry,
    RunEntry,
    SessionEntry,
    SessionLabels,
    SessionVerb,
)
from skyrl_actors.messages.model import ModelSpec
from skyrl_actors.messages.paths import TinkerPath
from skyrl_actors.messages.requests import Request
from skyrl_actors.messages.results import Completion, PartialSample, Ready, Result, Waiting
from skyrl_actors.observe.spans import Span
from skyrl_actors.transport.protocols import Deferred

CatalogArgument = TinkerPath | str | int | bool | None
CatalogAnswer = list[RunEntry] | RunEntry | list[CheckpointEntry] | bool | None


class ControllerCalls(Protocol):
    """Every call is idempotent; `ControllerActor` documents them.

    The annotations are the closed set of types that RPC sends. `status` has JSON values only.
    """

    async def get_capabilities(self) -> Capabilities: ...

    async def create_session(self, session_id: str, labels: SessionLabels) -> str: ...

    async def heartbeat(self, session_id: str) -> None: ...

    async def finish_session(
        self, session_id: str, how: str | None, detail: str | None
    ) -> None: ...

    async def submit(self, request: Request, request_id: str) -> str: ...

    async def retrieve(self, request_id: str, timeout_s: float) -> Result | Ready | Waiting: ...

    async def fetch(self, request_id: str, num_bytes: int) -> Deferred[Result]: ...

    async def open_sampler(
        self,
        sampler_id: str | None,
        session_id: str | None,
        base_model: str | None,
        path: str | None,
    ) -> Sampler: ...

    async def get_sampler(self, sampler_id: str) -> Sampler: ...

    async def get_model(self, model_id: str) -> Model: ...

    async def checkpoint_spec(self, path: TinkerPath) -> ModelSpec: ...

    async def catalog(self, verb: CatalogVerb, *arguments: CatalogArgument) -> CatalogAnswer: ...

    async def session_catalog(
        self, verb: SessionVerb, *arguments: str | None
    ) -> list[SessionEntry] | SessionEntry: ...

    async def partial(
        self, request_id: str, have: int, timeout_s: float
    ) -> PartialSample | Result | Ready: ...

    async def cancel_sample(self, request_id: str) -> None: ...

    async def completed(
        self, sampler_id: str, clone: int, cursor: int, timeout_s: float
    ) -> tuple[list[Completion], int]: ...

    async def join_sampler(self, sampler_id: str) -> int: ...

    async def fault(self) -> str | None: ...

    async def status(self) -> dict[str, Any]: ...

    async def spans(self) -> list[Span]: ...
