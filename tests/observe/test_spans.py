"""A collector receives one trace for each request, and JSON log lines contain ids."""

import contextvars
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_actors.groups.exactly_once import Applied, ExactlyOnce
from skyrl_actors.groups.worker_actor import TrainWorkerActor
from skyrl_actors.messages.columns import columns_from
from skyrl_actors.messages.errors import StateLost
from skyrl_actors.messages.example import TARGETS, Example
from skyrl_actors.messages.precondition import OpPrecondition
from skyrl_actors.observe.log import Json, named
from skyrl_actors.observe.spans import SPANS, Span, ids_of
from skyrl_actors.workers.interface import PartCall, WorkerSpec
from tests.api.local import MODEL, config_for, edge, posted
from tests.collector import collector, of_request
from tests.conftest import free_port


async def test_all_steps_of_a_request_are_in_one_trace(tmp_path: Path):
    with collector() as (url, received):
        SPANS.send_to(url, "s", "test")
        try:
            async with edge(config_for(tmp_path)) as http:
                session = (await posted(http, "/create_session", tags=[], sdk_version="0.5.0"))[
                    "session_id"
                ]
                made = await posted(
                    http,
                    "/create_model",
                    session_id=session,
                    model_seq_id=0,
                    base_model=MODEL,
                    lora_config={"rank": 4},
                )
                await posted(http, "/retrieve_future", request_id=made["request_id"])
                SPANS.close()
        finally:
            SPANS.send_to(None, "s", "test")
    first_id = ids_of(made["request_id"])[1]
    spans = {span.name: span for span in of_request(received, made["request_id"])}
    assert set(spans) == {"accept", "deliver", "request create_model", "wait", "create_model"}
    whole = spans.pop("request create_model")
    assert int.from_bytes(whole.span_id) == first_id and not int.from_bytes(whole.parent_span_id)
    assert all(int.from_bytes(span.parent_span_id) == first_id for span in spans.values())
    assert len({span.span_id for span in [whole, *spans.values()]}) == 5
    run, wait = spans["create_model"], spans["wait"]
    assert (
        whole.start_time_unix_nano
        <= wait.start_time_unix_nano
        <= run.start_time_unix_nano
        <= run.end_time_unix_nano
    )
    assert (
        abs(run.end_time_unix_nano - whole.end_time_unix_nano) < 1e6
        and spans["accept"].start_time_unix_nano <= run.start_time_unix_nano
    )
    assert {a.key: a.value.string_value for a in run.attributes}["outcome"] == "ok"


def test_the_span_of_a_refused_part_has_the_error():
    """A call has two parts. The second part is for a model that this rank does not hold.

    The span of each part counts the tokens of its own rows on this rank.
    """

    class Worker:
        def forward_backward(self, calls: Sequence[PartCall], forward_only: bool) -> list[str]:
            return ["done" for _ in calls]

    spec = WorkerSpec(
        role="policy",
        rank=1,
        world_size=2,
        base_folder="",
        dtype="float32",
        device="cpu",
        num_threads=1,
        microbatch_tokens=256,
        collective_timeout_s=30.0,
    )
    actor = TrainWorkerActor(None)
    actor.spec, actor._once = spec, ExactlyOnce(Worker())
    actor._once._applied["m"] = Applied(number=1, method="create_model", result=None)
    data = columns_from(
        [Example(np.zeros(n, np.int32), {TARGETS: np.zeros(n, np.int32)}) for n in (3, 5)]
    )
    with collector() as (url, received):
        SPANS.send_to(url, "s", "policy[1]")
        try:
            parts = [
                ("m", OpPrecondition(2, 1, "r1"), None),
                ("gone", OpPrecondition(4, 3, "r2"), None),
            ]
            outcomes = contextvars.copy_context().run(
                actor.forward_backward, 0, [data, data], False, parts, [(1,), (0, 1)]
            )
            SPANS.close()
        finally:
            SPANS.send_to(None, "s", "test")
    assert outcomes[0] == "done" and isinstance(outcomes[1], StateLost)
    recorded = []
    for request_id in ("r1", "r2"):
        (span,) = of_request(received, request_id)
        about = {a.key: a.value.string_value or a.value.int_value for a in span.attributes}
        recorded.append((span.name, about["outcome"], about["tokens"], about["together"]))
    assert recorded == [
        ("policy[1] forward_backward", "ok", 5, 2),
        ("policy[1] forward_backward", "StateLost", 8, 2),
    ]


def test_an_unreachable_collector_does_not_delay_callers(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.CRITICAL)
    SPANS.send_to(f"http://127.0.0.1:{free_port()}", "s", "test")
    try:
        began = time.monotonic()
        for number in range(500):
            SPANS.add(Span(name="x", row="m", began=1.0, seconds=1.0, request_id=f"r{number}"))
        # A caller that waited for the collector would wait for each of these.
        assert time.monotonic() - began < 10 and SPANS.recent[-1].request_id == "r499"
        SPANS.close()
        assert time.monotonic() - began < 30
    finally:
        SPANS.send_to(None, "s", "test")


def test_json_log_lines_contain_ids():
    record = logging.LogRecord(
        "skyrl_actors.controller.lanes", logging.WARNING, "f", 1, "operation %d", (7,), None
    )
    plain = json.loads(Json({"service": "s", "part": "controller"}).format(record))
    assert (
        plain["message"] == "operation 7"
        and plain["level"] == "WARNING"
        and plain["service"] == "s"
        and "request_id" not in plain
    )

    def within() -> dict[str, Any]:
        named("r1", "m:train:0")
        return json.loads(Json({}).format(record))

    line = contextvars.copy_context().run(within)
    assert (
        line["request_id"] == "r1"
        and line["model_id"] == "m:train:0"
        and line["time"].endswith("+00:00")
    )
