"""Limit the open requests of each API key, so that none has the connections of all others."""

from collections import Counter

from skyrl_actors.config.http import HttpConfig

MOST_OPEN = 20_000  # of all keys in one process: as many as HAProxy has connections at most
MOST_OF_OWNER = 8_000  # of one owner of keys, in all ingress processes
MOST_DOWNLOADS = 64  # of one owner's checkpoints, in one process
LEAST_OF_OWNER = 1_000  # that one process allows


class OpenRequests:
    """The open requests of one process by the owners of their keys; most of them are long polls.

    `limit` is for one owner. Requests without an owner, which is "", are not limited.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._of_owner: Counter[str] = Counter()

    def enter(self, owner: str) -> bool:
        """Count a request, or return False if its owner has too many."""
        if owner and self._of_owner[owner] >= self.limit:
            return False
        self._of_owner[owner] += 1
        return True

    def leave(self, owner: str) -> None:
        self._of_owner[owner] -= 1
        if not self._of_owner[owner]:
            del self._of_owner[owner]


def most_of_owner(http: HttpConfig) -> int:
    """Return the limit for one process."""
    return max(LEAST_OF_OWNER, MOST_OF_OWNER // (http.max_replicas or http.replicas))
