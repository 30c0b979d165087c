"""Load sessions, models, answers and open requests from the journal into the tables."""

import asyncio
import logging
from collections.abc import Collection
from dataclasses import replace

from skyrl_actors.controller.completions import EPOCH_BITS
from skyrl_actors.controller.ledger import Ledger
from skyrl_actors.controller.operations import Op
from skyrl_actors.controller.progress import Progress
from skyrl_actors.controller.replay import Replayer
from skyrl_actors.controller.tenants import Model, Sampler, TenantSession, TenantTable
from skyrl_actors.controller.verbs import model_verb
from skyrl_actors.controller.verbs.verb import AnsweredOp, ModelTables
from skyrl_actors.journal.entries import JournalState, Operation, SnapshotTaken
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages.errors import ConfigError, Corrupt
from skyrl_actors.messages.results import Failure

log = logging.getLogger(__name__)


async def load_tables(
    journal_state: JournalState, ledger: Ledger, tenants: TenantTable, replayer: Replayer
) -> list[Op]:
    """Fill the tables. Return the operations that were accepted and not answered, in order."""
    now = tenants.silence.mark_active(asyncio.get_running_loop().time())
    ledger.next_number = journal_state.next_number
    for session in journal_state.sessions:
        tenants.sessions[session.session_id] = TenantSession(
            session.session_id, now, session.user_metadata
        )
    ledger.answered_before = journal_state.recent
    ledger.recall.begin(journal_state.next_number, tenants.is_stream)
    snapshots = {snapshot.model_id: snapshot for snapshot in journal_state.snapshots}
    unanswered: list[Op] = []
    for header in journal_state.operations:
        if (
            header.kind == "CreateModel"
            and not header.failed
            and header.session_id in tenants.sessions
        ):
            await _model(
                header,
                snapshots.get(header.model_id or ""),
                journal_state.epoch,
                ledger,
                tenants,
                replayer,
            )
        if header.answered_at is None:
            model_id = header.model_id if header.kind != "Sample" else None
            unanswered.append(ledger.resume(header, model_id))
            continue
        if header.model_id in tenants.models:
            await _history(header, ledger, tenants, replayer)
    for s in journal_state.samplers:
        sampler = Sampler(
            sampler_id=s.sampler_id,
            base_model=s.base_model,
            model_path=s.model_path,
            # Earlier versions did not write the base model of weights.
            weights=replace(s.weights, base_model=s.weights.base_model or s.base_model),
            session_id=s.session_id,
            owner=s.owner,
            number=s.number,
            last_used=now,
        )
        tenants.put_sampler(sampler)
    return unanswered


def check_base(tenants: TenantTable, base_models: Collection[str]) -> None:
    """Raise ConfigError if the journal has models of another base model.

    Their weights would be restored onto this one, which nothing would notice if the shapes agree.
    """
    others = sorted({m.spec.base_model for m in tenants.models.values()} - {*base_models, ""})
    if others:
        raise ConfigError(
            f"the journal has models of base model {', '.join(others)}, and this service has "
            f"{', '.join(base_models)}; serve that base model to continue them, or set "
            "journal.folder (or journal.url) to a journal of its own"
        )


async def _model(
    header: Operation,
    snapshot: SnapshotTaken | None,
    epoch: int,
    ledger: Ledger,
    tenants: TenantTable,
    replayer: Replayer,
) -> None:
    try:
        request = await ledger.journal.request(header)
    except Corrupt as error:
        log.error("model %s is lost, its creation cannot be read: %s", header.model_id, error)
        tenants.lost[header.model_id or ""] = str(error)
        return
    assert isinstance(request, rq.CreateModel) and header.session_id is not None
    model = Model(
        spec=request.spec,
        session_id=header.session_id,
        user_metadata=request.user_metadata,
        ready=header.answered_at is not None,
    )
    # Epochs never repeat, so no version of an earlier controller has the same name.
    model.versions = epoch << EPOCH_BITS
    tenants.models[request.model_id] = model
    progress = replayer.progress[request.model_id] = Progress(position=header.number)
    if snapshot is not None:
        progress.position = progress.snapshot = snapshot.number
        model.steps = progress.step = snapshot.step


async def _history(
    header: Operation, ledger: Ledger, tenants: TenantTable, replayer: Replayer
) -> None:
    """Record an answered operation of a live model in the tables, as when it ran."""
    verb, model = model_verb(header.kind), tenants.models[header.model_id or ""]
    request, failure = None, None
    if header.failed and verb.failure_matters:
        request, failure = await _failure(header, ledger)
    op = AnsweredOp(
        number=header.number,
        effect=header.effect or "none",
        failed=header.failed,
        num_bytes=header.payload.length if header.payload else 0,
        request=request,
        failure=failure,
    )
    tables = ModelTables(tenants, replayer.progress)
    verb.fold(model, op, tables, asyncio.get_running_loop().time())


async def _failure(header: Operation, ledger: Ledger) -> tuple[rq.Request | None, str | None]:
    try:
        request, result = await ledger.journal.request(header), await ledger.journal.result(header)
    except Corrupt as error:
        return None, f"the reason is lost: {error}"
    return request, result.message if isinstance(result, Failure) else None
