"""The newest commits, kept to be made again in a database that lost them.

A database that fails over to an asynchronous copy goes back by its last commits, although they were confirmed. Rows
are small, so the newest ones are kept in memory.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_actors.messages.errors import InternalError

KEPT_ROWS = 20_000
Statement = tuple[Any, Any]  # what is executed, and its parameters


class CommitsLost(InternalError):
    """The database went back further than can be made good: the journal must be opened anew."""


@dataclass(frozen=True, slots=True)
class Commit:
    before: str
    token: str
    statements: Sequence[Statement]

    @property
    def rows(self) -> int:
        return 1 + sum(len(parameters) if isinstance(parameters, list) else 1 for _, parameters in self.statements)


class RedoLog:
    def __init__(self) -> None:
        self._commits: deque[Commit] = deque()
        self._rows = 0

    def add(self, commit: Commit) -> None:
        self._commits.append(commit)
        self._rows += commit.rows
        while self._rows > KEPT_ROWS and len(self._commits) > 1:
            self._rows -= self._commits.popleft().rows

    def since(self, token: str) -> list[Commit] | None:
        """All commits behind that one, in order; None when they are not all here."""
        found = list(self._commits)
        for index, commit in enumerate(found):
            if commit.before == token:
                return found[index:]
        return None
