"""The methods that ingress replicas and jobs call over RPC, by the object that serves them.

Every call is idempotent. The annotations are the closed set of types that RPC sends.
"""

from typing import Any, Protocol

from skyrl_actors.backends.backend import ServedModels
from skyrl_actors.controller.tenants import Model, Sampler
from skyrl_actors.messages.catalog import (
    CatalogVerb,
    CheckpointEntry,
    RunEntry,
    SessionEntry,
    SessionLabels,
    SessionVerb,
)
from skyrl_actors.messages.keys import Act, AuditEntry, KeyTable, StoredKey
from skyrl_actors.messages.model import ModelSpec
from skyrl_actors.messages.operating import FailedRequest, HistoryPoint, Mode, OpenRequest
from skyrl_actors.messages.paths import TinkerPath
from skyrl_actors.messages.requests import Request
from skyrl_actors.messages.results import Completion, PartialSample, Ready, Result, Waiting
from skyrl_actors.messages.usage import OwnerQuota, Quota, Usage
from skyrl_actors.observe.spans import Span
from skyrl_actors.transport.protocols import Deferred

CatalogArgument = TinkerPath | str | int | bool | None
CatalogAnswer = list[RunEntry] | RunEntry | list[CheckpointEntry] | bool | None


class ServiceCalls(Protocol):
    """What the started `Controller` serves."""

    async def get_capabilities(self) -> ServedModels: ...

    async def create_session(self, session_id: str, labels: SessionLabels) -> str: ...

    async def heartbeat(self, session_id: str) -> None: ...

    async def finish_session(
        self, session_id: str, how: str | None = None, detail: str | None = None
    ) -> None: ...

    async def submit(self, request: Request, request_id: str) -> str: ...

    async def cancel_sample(self, request_id: str) -> None: ...

    async def open_sampler(
        self,
        sampler_id: str | None,
        session_id: str | None,
        base_model: str | None,
        path: str | None,
    ) -> Sampler: ...

    async def join_sampler(self, sampler_id: str) -> int: ...

    async def get_sampler(self, sampler_id: str) -> Sampler: ...

    async def get_model(self, model_id: str) -> Model: ...

    async def checkpoint_spec(self, path: TinkerPath) -> ModelSpec: ...

    async def catalog(self, verb: CatalogVerb, *arguments: CatalogArgument) -> CatalogAnswer: ...

    async def session_catalog(
        self, verb: SessionVerb, *arguments: str | None
    ) -> list[SessionEntry] | SessionEntry: ...


class AnswerCalls(Protocol):
    """What the `Answers` of the started controller serve."""

    async def retrieve(self, request_id: str, timeout_s: float) -> Result | Ready | Waiting: ...

    async def fetch(self, request_id: str, num_bytes: int) -> Deferred[Result]: ...

    async def partial(
        self, request_id: str, have: int, timeout_s: float
    ) -> PartialSample | Result | Ready: ...

    async def completed(
        self, sampler_id: str, clone: int, cursor: int, timeout_s: float
    ) -> tuple[list[Completion], int]: ...


class KeyCalls(Protocol):
    """What the `KeyStore` of the started controller serves, which documents it."""

    async def known_keys(self, version: str) -> KeyTable | None: ...

    async def list_keys(self) -> list[StoredKey]: ...

    async def add_key(self, key: StoredKey, actor: str) -> StoredKey: ...

    async def rotate_key(self, key: StoredKey, grace_s: float, actor: str) -> list[StoredKey]: ...

    async def revoke_key(self, which: str, actor: str, at: float) -> list[StoredKey]: ...

    async def take_keys(self, keys: list[StoredKey]) -> None: ...


class UsageCalls(Protocol):
    """What the `QuotaStore` of the started controller serves, which documents it."""

    async def list_quotas(self) -> list[OwnerQuota]: ...

    async def set_quota(self, which: str, quota: Quota, actor: str) -> OwnerQuota: ...

    async def take_quotas(self, quotas: list[OwnerQuota]) -> None: ...

    async def usage(self, since: float, until: float, owner: str | None) -> list[Usage]: ...

    async def owner_named(self, which: str) -> str: ...

    async def owner_names(self) -> dict[str, str]: ...


class OperatorCalls(Protocol):
    """What the `Operators` of the started controller serve, which document it."""

    async def list_requests(self, owner: str | None, most: int) -> list[OpenRequest]: ...

    async def end_session(self, session_id: str, actor: str) -> None: ...

    async def cancel_request(self, request_id: str, actor: str) -> bool: ...

    async def list_failures(self, owner: str | None, most: int) -> list[FailedRequest]: ...

    async def history(self) -> list[HistoryPoint]: ...

    async def metrics(self, owner: str | None) -> str: ...

    async def get_mode(self) -> Mode: ...

    async def set_mode(self, mode: Mode, actor: str) -> Mode: ...


class AuditCalls(Protocol):
    """What the `AuditLog` of the started controller serves, which documents it."""

    async def note_access(self, act: Act, owner: str, path: str) -> None: ...

    async def audit(
        self, last: int, since: float = 0.0, until: float | None = None
    ) -> list[AuditEntry]: ...


class ProcessCalls(Protocol):
    """What `ControllerActor` serves, also before its controller has started."""

    async def fault(self) -> str | None: ...

    async def status(self) -> dict[str, Any]:
        """Return JSON values only."""
        ...

    async def spans(self) -> list[Span]: ...


class ControllerCalls(
    ServiceCalls,
    AnswerCalls,
    KeyCalls,
    UsageCalls,
    OperatorCalls,
    AuditCalls,
    ProcessCalls,
    Protocol,
):
    """All methods that the controller's process serves."""


class CatalogCalls(Protocol):
    """The verbs of `ServiceCalls.catalog`: methods of `CheckpointFolders`, which documents them."""

    async def runs(
        self, owner: str | None = None, published: bool = False, /
    ) -> list[RunEntry]: ...

    async def run(self, run_id: str, /) -> RunEntry: ...

    async def checkpoints(
        self, owner: str | None = None, published: bool = False, /
    ) -> list[CheckpointEntry]: ...

    async def is_public(self, path: TinkerPath, /) -> bool: ...

    async def copy(
        self, source: TinkerPath, target: TinkerPath, session_id: str, ttl_seconds: int | None, /
    ) -> None: ...

    async def set_public(self, path: TinkerPath, public: bool, /) -> None: ...

    async def set_ttl(self, path: TinkerPath, ttl_seconds: int | None, /) -> None: ...

    async def delete(self, path: TinkerPath, /) -> None: ...


class SessionCatalogCalls(Protocol):
    """The verbs of `ServiceCalls.session_catalog`: methods of `SessionCatalog`."""

    async def sessions(self, owner: str | None = None, /) -> list[SessionEntry]: ...

    async def session(self, session_id: str, /) -> SessionEntry: ...
