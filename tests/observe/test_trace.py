"""Phases as a trace."""

from skyrl_actors.observe.trace import events_of


def test_phases_and_moves_lie_behind_each_other():
    timeline = [
        {"at": 100.0, "phase": "TRAIN", "seconds": 0.5, "moves": [("free KV cache", 0.2, 10), ("load train weights", 0.3, 20)]},
        {"at": 104.0, "phase": "SAMPLE", "seconds": 1.0, "moves": [("load KV cache", 1.0, 10)]},
    ]
    events = [event for event in events_of("x", timeline, 110.0) if event["ph"] == "X"]
    spans = [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events]
    assert [(n, round(t, 6), round(d, 6)) for n, t, d in spans] == [
        ("TRAIN", 100.5, 3.5), ("free KV cache", 100.0, 0.2), ("load train weights", 100.2, 0.3), ("SAMPLE", 105.0, 5.0), ("load KV cache", 104.0, 1.0),
    ]  # fmt: skip
    assert events[1]["args"] == {"to": "TRAIN", "bytes": 10}
    assert events_of("x", [], 1.0)[0]["args"]["name"] == "skyrl-actors x"
