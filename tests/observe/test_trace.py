"""Convert phases and spans to trace events."""

from skyrl_actors.observe.spans import Span
from skyrl_actors.observe.trace import events_of, rows_of


def test_phases_and_moves_are_consecutive():
    timeline = [
        {
            "at": 100.0,
            "phase": "TRAIN",
            "seconds": 0.5,
            "moves": [("free KV cache", 0.2, 10), ("load train weights", 0.3, 20)],
        },
        {"at": 104.0, "phase": "SAMPLE", "seconds": 1.0, "moves": [("load KV cache", 1.0, 10)]},
    ]
    events = [event for event in events_of("x", timeline, 110.0) if event["ph"] == "X"]
    spans = [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events]
    assert [(n, round(t, 6), round(d, 6)) for n, t, d in spans] == [
        ("TRAIN", 100.5, 3.5),
        ("free KV cache", 100.0, 0.2),
        ("load train weights", 100.2, 0.3),
        ("SAMPLE", 105.0, 5.0),
        ("load KV cache", 104.0, 1.0),
    ]
    assert events[1]["args"] == {"to": "TRAIN", "bytes": 10}
    assert events_of("x", [], 1.0)[0]["args"]["name"] == "skyrl-actors x"


def test_overlapping_spans_are_placed_in_separate_rows():
    spans = [
        Span(name="sample", row="samples", began=1.0, seconds=2.0, request_id="r1"),
        Span(name="sample", row="samples", began=2.0, seconds=2.0, request_id="r2"),
        Span(name="sample", row="samples", began=3.5, seconds=1.0, request_id="r3"),
        Span(
            name="optim_step",
            row="m",
            began=0.5,
            seconds=0.1,
            request_id="r4",
            attributes={"operation": 4},
        ),
    ]
    events = rows_of(spans)
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    found = [(names[e["tid"]], e["args"]["request_id"]) for e in events if e["ph"] == "X"]
    assert found == [("m", "r4"), ("samples", "r1"), ("samples (2)", "r2"), ("samples", "r3")]
    assert next(e for e in events if e["name"] == "optim_step")["args"]["operation"] == 4
