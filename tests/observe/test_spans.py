"""One request as one trace, as an OpenTelemetry collector hears of it; and log lines with ids."""

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from skyrl_actors.observe.log import Json, named
from skyrl_actors.observe.spans import SPANS, Span, ids_of
from tests.api.local import MODEL, config_for, edge, posted
from tests.collector import collector, of_request
from tests.conftest import free_port


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
    first_id = ids_of(made["request_id"])[1]
    spans = {span.name: span for span in of_request(heard, made["request_id"])}
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
