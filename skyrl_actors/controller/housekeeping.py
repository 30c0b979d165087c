"""Loops that free models of silent sessions, expired checkpoints and old records.

A job that fails is logged, and runs again at its next time. It ends neither its loop nor the other
jobs.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from skyrl_actors.controller.checkpoints import CheckpointFolders
from skyrl_actors.controller.disk import Disk
from skyrl_actors.controller.session_catalog import SessionCatalog
from skyrl_actors.controller.tenants import TenantTable
from skyrl_actors.controller.verbs.verb import VerbContext
from skyrl_actors.journal.protocol import Journal
from skyrl_actors.messages.errors import SkyrlActorsError

log = logging.getLogger(__name__)
T = TypeVar("T")


async def free_silent_sessions(
    tenants: TenantTable, finish: Callable[[str], Awaitable[None]], timeout_s: float
) -> None:
    """Finish sessions without a sign of life for `timeout_s`, in an endless loop."""
    while True:
        await asyncio.sleep(timeout_s / 10)
        loop = asyncio.get_running_loop()
        for session_id in tenants.silent_sessions(loop.time(), timeout_s):
            if session_id not in tenants.silent_sessions(loop.time(), timeout_s):
                continue  # it was active while another one was freed
            log.warning(
                "session %s was silent for %.0f s: its models are freed", session_id, timeout_s
            )
            await attempt(f"session {session_id} was not freed", finish(session_id))


async def sweep_checkpoints(folders: CheckpointFolders, disk: Disk) -> int:
    """Remove expired checkpoints, one after the other, and return their number."""
    count = 0
    for run_id, folder in await disk.run("upkeep", folders.removal.expired):
        try:
            count += await disk.change(
                run_id, "whole checkpoints", folders.removal.remove_expired, folder
            )
        except OSError as error:
            log.warning("%s has expired and cannot be removed: %s", folder, error)
    return count


async def sweep(
    context: VerbContext, sessions: SessionCatalog, journal: Journal, every_s: float
) -> None:
    """Remove expired checkpoints, session records and journal entries, in an endless loop."""
    while True:
        await asyncio.sleep(every_s)
        await attempt(
            "expired checkpoints were not removed", sweep_checkpoints(context.folders, context.disk)
        )
        await attempt(
            "records of old sessions were not removed",
            asyncio.to_thread(sessions.sweep, context.config.journal.retention_s),
        )
        unfreed = {weights.version for weights in context.backend.unfreed()}
        if freed := await attempt("the journal was not swept", journal.sweep(unfreed)):
            log.info("removed %.1f MiB from the journal", freed / 2**20)


async def attempt(what_fails: str, job: Awaitable[T]) -> T | None:
    """Return the job's result. Log a failure and return None."""
    (outcome,) = await asyncio.gather(job, return_exceptions=True)
    if not isinstance(outcome, BaseException):
        return outcome
    log.error(
        "%s: %s",
        what_fails,
        outcome,
        exc_info=None if isinstance(outcome, SkyrlActorsError | OSError) else outcome,
    )
    return None
