"""Records of sessions that outlive them: one small file each, beside the checkpoints."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from skyrl_actors import clock
from skyrl_actors.controller.checkpoints import CheckpointFolders
from skyrl_actors.controller.notes import UNREADABLE, read_json, report, sweep_abandoned, write_json
from skyrl_actors.controller.owner_index import OwnerIndex
from skyrl_actors.controller.tenants import Sampler, TenantTable
from skyrl_actors.messages.catalog import RunEntry, SessionEntry, SessionNote
from skyrl_actors.messages.errors import NotFound
from skyrl_actors.messages.paths import checked_id, owner_of

log = logging.getLogger(__name__)
FOLDER = ".sessions"


class SessionCatalog:
    """List sessions that are live, and ended ones that are recorded or have training runs."""

    def __init__(
        self,
        tenants: TenantTable,
        folders: CheckpointFolders,
        wall: Callable[[], float] = clock.now,
    ):
        self._tenants = tenants
        self._folders = folders
        self._wall = wall
        self._index = OwnerIndex(folders.root / FOLDER)

    def _file(self, session_id: str) -> Path:
        return (
            self._folders.root
            / FOLDER
            / f"{checked_id(session_id, 'session id').replace(':', '_')}.json"
        )

    def opened(self, note: SessionNote) -> None:
        """Write the record of a new session. A repeat changes nothing."""
        file = self._file(note.session_id)
        if self._note(file) is None:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, asdict(note))

    def finished(self, session_id: str, how: str, detail: str | None) -> None:
        """Record how a session ended. Only the first call counts."""
        note = self._note(self._file(session_id))
        if note is not None and note.finished is None:
            write_json(self._file(session_id), asdict(note) | {"finished": how, "detail": detail})

    def _note(self, file: Path) -> SessionNote | None:
        content = read_json(file)
        try:
            return None if content is None else SessionNote(**content)
        except TypeError as error:
            report(str(file), repr(error))
            return None

    def sessions(self, owner: str | None = None) -> list[SessionEntry]:
        """Return sessions that are live or left a record or run, newest first.

        With `owner`, return only the sessions of that owner.
        """
        runs: dict[str, list[RunEntry]] = {}
        for run in self._folders.runs(owner):
            runs.setdefault(run.session_id, []).append(run)
        found = {note.session_id: note for file in self._files(owner) if (note := self._note(file))}
        for session_id, of_it in runs.items():
            found.setdefault(
                session_id,
                SessionNote(session_id=session_id, created_at=min(run.created_at for run in of_it)),
            )
        for session_id, session in list(self._tenants.sessions.items()):
            found.setdefault(
                session_id,
                SessionNote(
                    session_id=session_id,
                    created_at=self._wall(),
                    user_metadata=session.user_metadata,
                ),
            )
        notes = [
            note for note in found.values() if owner is None or owner_of(note.session_id) == owner
        ]
        samplers = self._tenants.samplers_by_session()
        entries = [self._entry(note, runs.get(note.session_id, []), samplers) for note in notes]
        return sorted(
            entries, key=lambda entry: (entry.note.created_at, entry.note.session_id), reverse=True
        )

    def _files(self, owner: str | None) -> list[Path]:
        names = self._index.names(owner)
        folder = self._folders.root / FOLDER
        return [folder / name for name in names if name.startswith("s") and name.endswith(".json")]

    def _entry(
        self,
        note: SessionNote,
        runs: list[RunEntry],
        samplers: Mapping[str | None, Sequence[Sampler]],
    ) -> SessionEntry:
        checkpoints = [checkpoint for run in runs for checkpoint in run.checkpoints]
        status = "active" if note.session_id in self._tenants.sessions else note.finished
        size = sum(checkpoint.num_bytes for checkpoint in checkpoints)
        return SessionEntry(
            note=note,
            status=status,
            run_ids=tuple(run.run_id for run in runs),
            sampler_ids=tuple(s.sampler_id for s in samplers.get(note.session_id, ())),
            num_checkpoints=len(checkpoints),
            num_bytes=size,
        )

    def session(self, session_id: str) -> SessionEntry:
        """Return one session. Raises NotFound for an unknown one."""
        note = self._note(self._file(session_id))
        runs = [
            run
            for run in self._folders.runs(owner_of(session_id) or None)
            if run.session_id == session_id
        ]
        known = self._tenants.sessions.get(session_id)
        if note is None and known is None and not runs:
            raise NotFound(f"unknown session {session_id!r}")
        return self._entry(
            note
            or SessionNote(
                session_id=session_id,
                created_at=self._wall(),
                user_metadata=known.user_metadata if known else {},
            ),
            runs,
            self._tenants.samplers_by_session(),
        )

    def sweep(self, older_than_s: float) -> None:
        """Remove the records of sessions that ended long ago and left no training run."""
        with_runs = {run.session_id for run in self._folders.runs()}
        for entry in self.sessions():
            if not self._folders.keeps(entry.note.session_id):
                continue
            old = self._wall() - entry.note.created_at > older_than_s
            if old and entry.status != "active" and entry.note.session_id not in with_runs:
                try:
                    self._file(entry.note.session_id).unlink(missing_ok=True)
                except UNREADABLE as error:
                    log.warning(
                        "the record of session %s was not removed: %s", entry.note.session_id, error
                    )
        sweep_abandoned(self._folders.root / FOLDER)
