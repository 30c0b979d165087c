"""What a journal knows, put back into the controller's tables: who is here, what was answered, what is still owed."""

import asyncio
import logging

from skyrl_actors.controller.completions import EPOCH_BITS
from skyrl_actors.controller.ledger import Ledger, Op
from skyrl_actors.controller.recovery import Progress, Recovery
from skyrl_actors.controller.tenants import Model, Sampler, Session, TenantTable
from skyrl_actors.journal.entries import Books, Operation, SnapshotTaken
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages.errors import Corrupt
from skyrl_actors.messages.results import Failure

log = logging.getLogger(__name__)


async def take_up(books: Books, ledger: Ledger, tenants: TenantTable, recovery: Recovery) -> list[Op]:
    """Fill the tables; returns the operations that were promised and not answered, in order."""
    now = tenants.silence.hear(asyncio.get_running_loop().time())
    ledger.next_number = books.next_number
    for session in books.sessions:
        tenants.sessions[session.session_id] = Session(session.session_id, now, session.user_metadata)
    ledger.answered_before = books.recent
    ledger.recall.begin(books.next_number)
    snapshots = {snapshot.model_id: snapshot for snapshot in books.snapshots}
    owed = []
    for header in books.operations:
        if header.kind == "CreateModel" and not header.failed and header.session_id in tenants.sessions:
            await _model(header, snapshots.get(header.model_id or ""), books.epoch, ledger, tenants, recovery)
        if header.answered_at is None:
            line = header.model_id if header.kind != "Sample" else None
            owed.append(ledger.take_up(header, line))
            continue
        if header.model_id in tenants.models:
            await _history(header, ledger, tenants, recovery)
    for s in books.samplers:
        tenants.samplers[s.sampler_id] = Sampler(
            s.sampler_id, s.base_model, s.model_path, s.weights, s.session_id, s.owner, s.number, last_used=now
        )
    return owed


async def _model(
    header: Operation,
    snapshot: SnapshotTaken | None,
    epoch: int,
    ledger: Ledger,
    tenants: TenantTable,
    recovery: Recovery,
) -> None:
    try:
        request = await ledger.journal.request(header)
    except Corrupt as error:
        log.error("model %s can not be known any more: %s", header.model_id, error)
        tenants.lost[header.model_id or ""] = str(error)
        return
    assert isinstance(request, rq.CreateModel) and header.session_id is not None
    model = Model(request.spec, header.session_id, request.user_metadata, ready=header.answered_at is not None)
    model.versions = epoch << EPOCH_BITS  # epochs never repeat, so no version of an earlier controller has such a name
    tenants.models[request.model_id] = model
    progress = recovery.progress[request.model_id] = Progress(header.number)
    if snapshot is not None:
        progress.position = progress.snapshot = snapshot.number
        model.steps = progress.step = snapshot.step


async def _history(header: Operation, ledger: Ledger, tenants: TenantTable, recovery: Recovery) -> None:
    """One answered operation of a model that lives, as `Lanes` noted it when it ran."""
    model_id = header.model_id or ""
    model, progress = tenants.models[model_id], recovery.progress[model_id]
    if header.effect != "none" and header.number > progress.position:
        progress.applied(header.number, header.payload.length if header.payload else 0, asyncio.get_running_loop().time())
    model.steps = progress.step = max(progress.step, header.step or 0)
    if header.kind == "Unload" and not header.failed:
        del tenants.models[model_id], recovery.progress[model_id]
    elif header.kind == "OptimStep" and header.effect != "none":
        model.incomplete = None
    elif header.kind == "ForwardBackward" and header.failed:
        try:
            request, result = await ledger.journal.request(header), await ledger.journal.result(header)
        except Corrupt as error:
            model.incomplete = f"the reason is lost: {error}"
            return
        if isinstance(request, rq.ForwardBackward) and not request.forward_only and isinstance(result, Failure):
            model.incomplete = result.message
