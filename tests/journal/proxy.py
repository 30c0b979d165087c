"""A TCP proxy in front of PostgreSQL's socket that can simulate a vanished host."""

import contextlib
import selectors
import socket
import threading
from pathlib import Path


class Proxy:
    """Forward connections, or stop: then data is neither forwarded nor refused.

    The system still acknowledges the data.
    """

    def __init__(self, target: Path):
        self._target = str(target)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._silent: set[socket.socket] = set()
        self._partner: dict[socket.socket, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._open = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def silence(self) -> None:
        """Stop all present connections. Later ones are forwarded, as to a failover host."""
        with self._lock:
            for end in list(self._partner):
                self._selector.unregister(end)
            self._silent |= self._partner.keys()
            self._partner.clear()

    def close(self) -> None:
        self._open = False
        self._thread.join()
        for end in (*self._silent, *self._partner, self._listener):
            end.close()
        self._selector.close()

    def _run(self) -> None:
        while self._open:
            for key, _ in self._selector.select(0.02):
                with self._lock, contextlib.suppress(KeyError, OSError):
                    self._serve(key.fileobj)  # type: ignore[arg-type]

    def _serve(self, end: socket.socket) -> None:
        if end is self._listener:
            client, _ = self._listener.accept()
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._target)
            self._partner |= {client: server, server: client}
            for each in (client, server):
                self._selector.register(each, selectors.EVENT_READ)
            return
        partner = self._partner[end]
        content = end.recv(65536)
        if content:
            partner.sendall(content)
            return
        for each in (end, partner):
            self._selector.unregister(each)
            del self._partner[each]
            each.close()
