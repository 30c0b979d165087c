"""End calls to a database that stopped answering without closing its connections.

The system ends a connection whose data is not acknowledged. It cannot detect a host that
acknowledges and does not answer. Examples are a stalled disk, and a proxy in front of a host that
vanished.
"""

import logging
import os
import socket
import threading
import time
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import DisconnectionError

log = logging.getLogger(__name__)
LONGEST_CALL_S = 20.0  # above the server's own limit of one statement
LOOK_S = 0.25


class Watchdog:
    """Limit the time from a connection's checkout to its return to the pool (PostgreSQL)."""

    def __init__(self, engine: sa.Engine):
        self._dialect = engine.dialect
        # by pool record: the time of the checkout, and the connection
        self._taken: dict[int, tuple[float, Any]] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        event.listen(engine, "checkout", self._on_taken)
        event.listen(engine, "checkin", self._on_back)
        event.listen(engine, "invalidate", self._on_back)
        threading.Thread(target=self._look, name="journal-watchdog", daemon=True).start()

    def close(self) -> None:
        self._closing.set()

    def _on_taken(self, connection: Any, record: Any, _: Any) -> None:
        with self._lock:
            self._taken[id(record)] = time.monotonic(), connection
        try:
            self._dialect.do_ping(connection)
        except self._dialect.loaded_dbapi.Error as error:
            self._on_back(connection, record)
            raise DisconnectionError(str(error)) from error  # the pool connects again

    def _on_back(self, connection: Any, record: Any, _: Any = None) -> None:
        with self._lock:
            self._taken.pop(id(record), None)

    def _look(self) -> None:
        while not self._closing.wait(LOOK_S):
            # The lock stays held: a descriptor must not be reused for another file meanwhile.
            with self._lock:
                for key, (since, connection) in list(self._taken.items()):
                    if time.monotonic() - since > LONGEST_CALL_S:
                        del self._taken[key]
                        _cut(connection)


def _cut(connection: Any) -> None:
    """Shut the socket down, so that the waiting thread gets an error."""
    log.error(
        "the journal's database did not answer for %.0f s: the connection is closed",
        LONGEST_CALL_S,
    )
    try:
        with socket.socket(fileno=os.dup(connection.pgconn.socket)) as line:
            line.shutdown(socket.SHUT_RDWR)
    except (OSError, ValueError) as error:
        log.warning("the connection was closed already: %s", error)
