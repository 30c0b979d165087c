"""A proxy that sends requests twice, as a client does whose connection broke before the answer.

The bodies are those of the SDK, byte by byte, so this works with servers that take only protobuf.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast

import httpx

OF_CONNECTION = {"host", "connection", "keep-alive", "transfer-encoding", "content-length"}


class Repeating(ThreadingHTTPServer):
    """Passes requests on to a server. Those whose path ends with one of `paths` go twice."""

    daemon_threads = True

    def __init__(self, base_url: str, paths: tuple[str, ...], timeout_s: float):
        super().__init__(("127.0.0.1", 0), _Passing)
        # The answer is passed on as it is encoded, so it has only encodings that the SDK names.
        plain = {"Accept-Encoding": "identity"}
        self.there = httpx.Client(base_url=base_url, timeout=timeout_s, headers=plain)
        self.paths = paths
        self.repeats = 0  # requests whose first answer was a success

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._pass_on()

    def do_POST(self) -> None:
        self._pass_on()

    def do_PUT(self) -> None:
        self._pass_on()

    def do_DELETE(self) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        proxy = cast(Repeating, self.server)
        try:
            status, headers, content = self._answer(proxy, body)
            if self.path.endswith(proxy.paths):
                proxy.repeats += status < 400
                status, headers, content = self._answer(proxy, body)
        except (httpx.HTTPError, RuntimeError):
            # The SDK asks again, as it does without a proxy. The second: the proxy has ended, and a
            # heartbeat of its session comes late.
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _answer(self, proxy: Repeating, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """Return the status, the headers and the encoded body of an answer."""
        headers = [(k, v) for k, v in self.headers.items() if k.lower() not in OF_CONNECTION]
        with proxy.there.stream(self.command, self.path, content=body, headers=headers) as answer:
            own = [p for p in answer.headers.multi_items() if p[0].lower() not in OF_CONNECTION]
            return answer.status_code, own, b"".join(answer.iter_raw())

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing: the scorecard says what was found."""


@contextmanager
def repeating(base_url: str, paths: tuple[str, ...], timeout_s: float) -> Iterator[Repeating]:
    """Run a proxy in a thread."""
    with Repeating(base_url, paths, timeout_s) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()
            proxy.there.close()
