"""What operators do while the service runs: list and cancel requests, end sessions, pause, drain.

Every act is in the audit log.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol

from skyrl_actors.config.keys import is_of
from skyrl_actors.controller.lanes import Lanes
from skyrl_actors.controller.ledger import Ledger
from skyrl_actors.controller.operations import Op
from skyrl_actors.controller.samples import Samples
from skyrl_actors.controller.verbs import model_verb
from skyrl_actors.controller.verbs.verb import VerbContext
from skyrl_actors.journal.entries import ModeSet
from skyrl_actors.messages.errors import InvalidRequest, NotFound, SkyrlActorsError, Unavailable
from skyrl_actors.messages.keys import Act
from skyrl_actors.messages.operating import MODES, FailedRequest, HistoryPoint, Mode, OpenRequest
from skyrl_actors.messages.paths import owner_of
from skyrl_actors.observe.counts import COUNTS
from skyrl_actors.observe.exposition import EXPOSED

ACTS: dict[Mode, Act] = {"running": "resume", "paused": "pause", "draining": "drain"}
CANCELLED = "cancelled by an operator"
ENDED = "ended by an operator"
ANSWER_S = 20.0  # how long an act waits for what it began


class EndSession(Protocol):
    """Frees what a session holds."""

    def __call__(
        self, session_id: str, how: str | None = None, detail: str | None = None
    ) -> Coroutine[Any, Any, None]: ...


class Operators:
    """The acts of operators on one controller."""

    def __init__(
        self,
        context: VerbContext,
        ledger: Ledger,
        lanes: Lanes,
        samples: Samples,
        end_session: EndSession,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._tenants = context.tenants
        self._capacity = context.capacity
        self._name = context.config.name
        self._mode = context.admin.mode
        self._log = context.admin.log
        self._recent = context.admin.recent
        self._journal = ledger.journal
        self._ledger = ledger
        self._lanes = lanes
        self._samples = samples
        self._end_session = end_session
        self._clock = clock

    async def list_requests(self, owner: str | None, most: int) -> list[OpenRequest]:
        """Return the oldest open requests of an owner, or of all for None."""
        mine = [op for op in self._ledger.ops.values() if owner in (None, owner_of(op.request_id))]
        return [self._shown(op) for op in sorted(mine, key=lambda op: op.number)[:most]]

    def _shown(self, op: Op) -> OpenRequest:
        return OpenRequest(
            request_id=op.request_id,
            kind=op.kind or "unread",
            target=op.model_id or op.stream,
            owner=owner_of(op.request_id) or owner_of(op.session_id or ""),
            is_running=op.begun is not None and not self._samples.waits_for_base(op),
            age_s=round(self._clock() - op.accepted, 3),
            num_bytes=op.num_bytes,
        )

    async def end_session(self, session_id: str, actor: str) -> None:
        """End a session: its queued requests fail, its models and samplers are freed.

        A model whose request runs is freed after it, which this does not wait for. Raises NotFound
        for a session that is not live.
        """
        self._tenants.session(session_id)
        await self._journal.write(self._log.entry("end", actor, session_id))
        ending = self._lanes.tasks.spawn(self._end_session(session_id, "interrupted", ENDED))
        await asyncio.wait((ending,), timeout=ANSWER_S)
        if ending.done():
            ending.result()
        elif session_id in self._tenants.sessions:
            raise Unavailable(f"{session_id} is being ended, which waits for the journal")

    async def cancel_request(self, request_id: str, actor: str) -> bool:
        """Let an open request fail, and return whether it is answered.

        If not, it follows its model's running request. It must then be cancelled again if the
        controller restarts before. Raises NotFound for an answered or unknown request, and
        InvalidRequest for a running one of a model, whose changes cannot be undone.
        """
        op = self._ledger.ops.get(request_id)
        if op is None:
            raise NotFound(f"no open request {request_id[:80]!r}; `requests` shows all")
        if op.kind is not None and op.model_id is not None and model_verb(op.kind).ends_model:
            raise InvalidRequest(f"{request_id} frees a model; it cannot be cancelled")
        waits_for_room = self._capacity.reason(request_id) is not None
        if op.model_id is not None and op.begun is not None and not waits_for_room:
            raise InvalidRequest(
                f"{request_id} runs on the ranks, or waits for its base model, and cannot be "
                "stopped; end its session to free the model after it"
            )
        # Before anything is awaited: it could begin to run meanwhile.
        if op.model_id is not None:
            self._lanes.cancel(op, CANCELLED)
        elif not self._samples.cancel(request_id, CANCELLED):
            raise InvalidRequest(f"{request_id} is being answered and cannot be cancelled")
        await self._journal.write(self._log.entry("cancel", actor, f"{op.kind} {request_id}"))
        if request_id not in self._ledger.results:
            return True
        return await self._ledger.results.wait(request_id, ANSWER_S) is not None

    async def list_failures(self, owner: str | None, most: int) -> list[FailedRequest]:
        """Return the newest failures of an owner, or of all for None; the newest is first."""
        return self._recent.failures(owner, most)

    async def history(self) -> list[HistoryPoint]:
        """Return the totals of each minute of the last 24 hours, oldest first."""
        return self._recent.history()

    async def metrics(self, owner: str | None) -> str:
        """Return all metrics in the text format of Prometheus.

        Those of a tenant are left out, unless it is the owner, or `owner` is None.
        """
        fresh = COUNTS.read() | {(name, ()): level for name, level in COUNTS.levels().items()}
        return EXPOSED.text(self._name, fresh, lambda tenant: is_of(tenant, owner))

    async def get_mode(self) -> Mode:
        return self._mode.mode

    async def set_mode(self, mode: Mode, actor: str) -> Mode:
        """Pause, drain or resume the service. Returns the mode before."""
        if mode not in MODES:
            raise InvalidRequest(f"the mode is {mode!r}; use {', '.join(MODES)}")
        before = self._mode.mode
        if mode != before:
            act = ACTS[mode]
            await self._journal.write(ModeSet(mode), self._log.entry(act, actor, self._counts()))
            self._mode.set(mode)
        return before

    async def end_drain(self) -> None:
        """Let the next controller accept requests, if this one was drained before its end."""
        if self._mode.mode == "draining":
            with suppress(SkyrlActorsError):  # the journal may be what is wrong
                note = self._log.entry("resume", "the end of the service", self._counts())
                await self._journal.write(ModeSet("running"), note)

    def _counts(self) -> str:
        return f"{len(self._tenants.sessions)} sessions, {len(self._ledger.ops)} open requests"
