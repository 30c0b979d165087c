"""Ends calls to a database that has stopped answering without closing its connections.

The system ends a connection whose data nobody acknowledges. It cannot notice a host that acknowledges and does not
answer: a stalled disk, or a proxy in front of a host that vanished.
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
    """For PostgreSQL. Watches each connection from when it is taken from the pool until it is back."""

    def __init__(self, engine: sa.Engine):
        self._dialect = engine.dialect
        self._taken: dict[int, tuple[float, Any]] = {}  # by pool record: since when, and the connection
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
            raise DisconnectionError(str(error)) from error  # the pool makes a new one

    def _on_back(self, connection: Any, record: Any, _: Any = None) -> None:
        with self._lock:
            self._taken.pop(id(record), None)

    def _look(self) -> None:
        while not self._closing.wait(LOOK_S):
            with self._lock:  # held while one is cut: its descriptor cannot become another file's
                for key, (since, connection) in list(self._taken.items()):
                    if time.monotonic() - since > LONGEST_CALL_S:
                        del self._taken[key]
                        _cut(connection)


def _cut(connection: Any) -> None:
    """The thread that waits for an answer gets an error."""
    log.error("the journal's database did not answer for %.0f s: the connection is cut", LONGEST_CALL_S)
    try:
        with socket.socket(fileno=os.dup(connection.pgconn.socket)) as line:
            line.shutdown(socket.SHUT_RDWR)
    except (OSError, ValueError) as error:
        log.warning("it was closed already: %s", error)
