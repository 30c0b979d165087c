"""Keep the newest commits in memory, to repeat them in a database that lost them.

A database that fails over to an asynchronous copy loses its last commits, although they were
confirmed. Rows are small, so memory suffices for the newest ones.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from skyrl_actors.messages.errors import InternalError

KEPT_ROWS = 20_000
Statement = tuple[Any, Any]  # a statement and its parameters


class CommitsLost(InternalError):
    """The database lost more commits than are kept: the journal must be opened again."""


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit: the commit token before and after it, and its statements."""

    before: str
    token: str
    statements: Sequence[Statement]

    @property
    def rows(self) -> int:
        return 1 + sum(
            len(cast(list[Any], parameters)) if isinstance(parameters, list) else 1
            for _, parameters in self.statements
        )


class RedoLog:
    """The newest commits, with at most KEPT_ROWS rows."""

    def __init__(self) -> None:
        self._commits: deque[Commit] = deque()
        self._rows = 0

    def add(self, commit: Commit) -> None:
        self._commits.append(commit)
        self._rows += commit.rows
        while self._rows > KEPT_ROWS and len(self._commits) > 1:
            self._rows -= self._commits.popleft().rows

    def since(self, token: str) -> list[Commit] | None:
        """Return all commits after `token`, in order, or None when some are no longer kept."""
        found = list(self._commits)
        for index, commit in enumerate(found):
            if commit.before == token:
                return found[index:]
        return None
