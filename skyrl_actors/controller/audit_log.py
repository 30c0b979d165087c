"""Record administrative acts, and access to published checkpoints, in the journal."""

import logging
from collections.abc import Callable

from skyrl_actors.journal.entries import Audited
from skyrl_actors.journal.protocol import Journal
from skyrl_actors.messages.errors import Unavailable
from skyrl_actors.messages.keys import Act, AuditEntry
from skyrl_actors.messages.usage import HOUR_S

log = logging.getLogger(__name__)
LONGEST_ACTOR = 200


class AuditLog:
    """The audit log of one controller. `label` returns the name of an owner."""

    def __init__(self, journal: Journal, wall: Callable[[], float], label: Callable[[str], str]):
        self._journal = journal
        self._wall = wall
        self._label = label
        self._hour = -1
        self._read: set[tuple[str, str]] = set()  # (owner, path) that were recorded this hour

    def entry(self, act: Act, actor: str, subject: str) -> Audited:
        """Return an act of now, to be written together with what it changed."""
        return Audited(
            AuditEntry(at=self._wall(), actor=actor[:LONGEST_ACTOR], act=act, subject=subject)
        )

    async def note_access(self, act: Act, owner: str, path: str) -> None:
        """Record that the holder of a key published, withdrew or read a checkpoint.

        Also acts of an admin on what another key owns.

        Reads of one checkpoint by one owner are recorded once an hour, and are possible while the
        journal cannot write.
        """
        hour = int(self._wall() // HOUR_S)
        if hour != self._hour:
            self._hour, self._read = hour, set()
        if act == "read" and (owner, path) in self._read:
            return
        actor = f"key of {self._label(owner)}" if owner else "without a key"
        try:
            await self._journal.write(self.entry(act, actor, path))
        except Unavailable as error:
            if act != "read":
                raise
            log.error("a read of %s by %s is not recorded: %s", path, actor, error)
        else:
            if act == "read":
                self._read.add((owner, path))

    async def audit(
        self, last: int, since: float = 0.0, until: float | None = None
    ) -> list[AuditEntry]:
        """Return the newest acts from `since` to before `until`, oldest first."""
        return await self._journal.audit(last, since, until)
