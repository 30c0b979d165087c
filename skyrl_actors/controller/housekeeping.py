"""Loops that free what nobody will ask for again: models of silent sessions, expired checkpoints, old records."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from skyrl_actors.controller.checkpoints import CheckpointFolders
from skyrl_actors.controller.session_catalog import SessionCatalog
from skyrl_actors.controller.tenants import TenantTable
from skyrl_actors.journal.base import Journal
from skyrl_actors.messages.errors import InternalError, SkyrlActorsError

log = logging.getLogger(__name__)


async def free_silent_sessions(tenants: TenantTable, finish: Callable[[str], Awaitable[None]], timeout_s: float) -> None:
    while True:
        await asyncio.sleep(timeout_s / 10)
        for session_id in tenants.silent_sessions(asyncio.get_running_loop().time(), timeout_s):
            log.warning("session %s was silent for %.0f s: its models are freed", session_id, timeout_s)
            try:
                await finish(session_id)
            except SkyrlActorsError as error:
                log.error("session %s was not freed: %s", session_id, error)


async def sweep(
    folders: CheckpointFolders, sessions: SessionCatalog, journal: Journal, every_s: float, retention_s: float
) -> None:  # fmt: skip
    while True:
        await asyncio.sleep(every_s)
        try:
            await asyncio.to_thread(folders.sweep)
            await asyncio.to_thread(sessions.sweep, retention_s)
            freed = await journal.sweep()
            if freed:
                log.info("swept %.1f MiB out of the journal", freed / 2**20)
        except (InternalError, OSError) as error:
            log.warning("%s", error)
