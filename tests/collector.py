"""An OpenTelemetry collector that keeps the spans it receives."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from skyrl_actors.observe.spans import ids_of


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Yield the collector's address and the list of received spans."""
    heard: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            request = ExportTraceServiceRequest.FromString(body)
            heard.extend(
                span
                for resource in request.resource_spans
                for scope in resource.scope_spans
                for span in scope.spans
            )
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", heard
    finally:
        server.shutdown()
        server.server_close()


def of_request(heard: list[Any], request_id: str) -> list[Any]:
    """Return the spans of this request in the order of their arrival."""
    trace_id = ids_of(request_id)[0]
    return [span for span in heard if int.from_bytes(span.trace_id) == trace_id]
