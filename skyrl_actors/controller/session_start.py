"""Open sessions, each once."""

from collections.abc import Callable

from skyrl_actors.controller import admission
from skyrl_actors.controller.disk import Disk
from skyrl_actors.controller.keyed_locks import KeyedLocks
from skyrl_actors.controller.metering import Metering
from skyrl_actors.controller.session_catalog import SessionCatalog
from skyrl_actors.controller.tenants import TenantSession, TenantTable
from skyrl_actors.journal.entries import SessionOpened
from skyrl_actors.journal.protocol import Journal
from skyrl_actors.messages.catalog import SessionLabels, SessionNote
from skyrl_actors.messages.paths import owner_of

SESSIONS_PER_KEY = 1000  # open sessions of one API key


class SessionStart:
    """Checks new sessions and writes them down. `wall` is in seconds, `now` is loop time."""

    def __init__(
        self,
        tenants: TenantTable,
        catalog: SessionCatalog,
        journal: Journal,
        disk: Disk,
        meter: Metering,
        wall: Callable[[], float],
    ):
        self._tenants = tenants
        self._catalog = catalog
        self._journal = journal
        self._disk = disk
        self._meter = meter
        self._wall = wall
        self._locks = KeyedLocks()  # a repeat waits for the first
        self._opening: set[str] = set()

    async def open(self, session_id: str, labels: SessionLabels, now: Callable[[], float]) -> None:
        """Open a session; idempotent by id. Raises UserError or Unavailable."""
        async with self._locks.holding(session_id):
            if session_id in self._tenants.sessions:
                return
            counted = (*self._tenants.sessions, *self._opening)
            admission.check_count(counted, session_id, SESSIONS_PER_KEY, "sessions")
            admission.check_metadata(labels.user_metadata)
            admission.check_tags(labels.tags)
            self._meter.admit_session(owner_of(session_id))
            self._opening.add(session_id)
            try:
                await self._written(session_id, labels)
            finally:
                self._opening.discard(session_id)
            self._tenants.sessions[session_id] = TenantSession(
                session_id, self._tenants.silence.mark_active(now()), labels.user_metadata
            )

    async def _written(self, session_id: str, labels: SessionLabels) -> None:
        note = SessionNote(
            session_id=session_id,
            created_at=self._wall(),
            user_metadata=labels.user_metadata,
            display_name=labels.display_name,
            tags=labels.tags,
            project_id=labels.project_id,
        )
        await self._disk.write("few files", self._catalog.opened, note)
        await self._journal.write(SessionOpened(session_id, note.user_metadata, note.created_at))
