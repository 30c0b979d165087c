"""A TCP proxy on loopback in front of PostgreSQL's socket, which can fall silent as a host that vanished does."""

import contextlib
import selectors
import socket
import threading
from pathlib import Path


class Proxy:
    """Silent: what runs through it is neither forwarded nor closed, and the system still acknowledges it."""

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
        """All connections of this moment; later ones run, as to the host that took over."""
        with self._lock:
            for line in list(self._partner):
                self._selector.unregister(line)
            self._silent |= self._partner.keys()
            self._partner.clear()

    def close(self) -> None:
        self._open = False
        self._thread.join()
        for line in (*self._silent, *self._partner, self._listener):
            line.close()
        self._selector.close()

    def _run(self) -> None:
        while self._open:
            for key, _ in self._selector.select(0.02):
                with self._lock, contextlib.suppress(KeyError, OSError):
                    self._serve(key.fileobj)  # type: ignore[arg-type]

    def _serve(self, line: socket.socket) -> None:
        if line is self._listener:
            client, _ = self._listener.accept()
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._target)
            self._partner |= {client: server, server: client}
            for end in (client, server):
                self._selector.register(end, selectors.EVENT_READ)
            return
        partner = self._partner[line]
        content = line.recv(65536)
        if content:
            partner.sendall(content)
            return
        for end in (line, partner):
            self._selector.unregister(end)
            del self._partner[end]
            end.close()
