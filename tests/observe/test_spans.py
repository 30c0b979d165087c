"""One request as one trace, as an OpenTelemetry collector hears of it; and log lines with ids."""

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from skyrl_actors.observe.log import Json, named
from skyrl_actors.observe.spans import SPANS, Span, ids_of
from tests.api.local import MODEL, config_for, edge, posted
from tests.conftest import free_port


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Takes spans as a collector does."""
    heard: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            request = ExportTraceServiceRequest.FromString(body)
            heard.extend(span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", heard
    finally:
        server.shutdown()
        server.server_close()


async def test_a_request_is_followed_from_ingress_to_result(tmp_path: Path):
    with collector() as (url, heard):
        SPANS.send_to(url, "s", "test")
        try:
            async with edge(config_for(tmp_path)) as http:
                session = (await posted(http, "/create_session", tags=[], sdk_version="0.5.0"))["session_id"]
                made = await posted(
                    http, "/create_model", session_id=session, model_seq_id=0, base_model=MODEL, lora_config={"rank": 4}
                )
                await posted(http, "/retrieve_future", request_id=made["request_id"])
                SPANS.close()
        finally:
            SPANS.send_to(None, "s", "test")
    trace_id, first_id = ids_of(made["request_id"])
    spans = {span.name: span for span in heard if int.from_bytes(span.trace_id) == trace_id}
    assert set(spans) == {"accept", "deliver", "request create_model", "wait", "create_model"}
    whole = spans.pop("request create_model")
    assert int.from_bytes(whole.span_id) == first_id and not int.from_bytes(whole.parent_span_id)
    assert all(int.from_bytes(span.parent_span_id) == first_id for span in spans.values())
    assert len({span.span_id for span in [whole, *spans.values()]}) == 5
    run, wait = spans["create_model"], spans["wait"]
    assert whole.start_time_unix_nano <= wait.start_time_unix_nano <= run.start_time_unix_nano <= run.end_time_unix_nano
    assert (
        abs(run.end_time_unix_nano - whole.end_time_unix_nano) < 1e6
        and spans["accept"].start_time_unix_nano <= run.start_time_unix_nano
    )
    assert {a.key: a.value.string_value for a in run.attributes}["outcome"] == "ok"


def test_a_collector_that_is_away_costs_no_caller_anything(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.CRITICAL)
    SPANS.send_to(f"http://127.0.0.1:{free_port()}", "s", "test")
    try:
        began = time.monotonic()
        for number in range(500):
            SPANS.add(Span("x", "m", 1.0, 1.0, f"r{number}"))
        assert time.monotonic() - began < 1 and SPANS.recent[-1].request_id == "r499"
        SPANS.close()
        assert time.monotonic() - began < 30
    finally:
        SPANS.send_to(None, "s", "test")


def test_json_lines_bear_ids():
    record = logging.LogRecord("skyrl_actors.controller.lanes", logging.WARNING, "f", 1, "operation %d", (7,), None)
    plain = json.loads(Json({"service": "s", "part": "controller"}).format(record))
    assert (
        plain["message"] == "operation 7"
        and plain["level"] == "WARNING"
        and plain["service"] == "s"
        and "request_id" not in plain
    )
    import contextvars

    def within() -> dict[str, Any]:
        named("r1", "m:train:0")
        return json.loads(Json({}).format(record))

    line = contextvars.copy_context().run(within)
    assert line["request_id"] == "r1" and line["model_id"] == "m:train:0" and line["time"].endswith("+00:00")
