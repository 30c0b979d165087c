"""Reading the folders of runs."""

import json
from pathlib import Path

import pytest

from skyrl_actors.observe import runs


@pytest.mark.parametrize("block", [1, 7, 64, 2**20])
def test_the_last_samples_are_read_from_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
):
    monkeypatch.setattr(runs, "BLOCK", block)
    rows = [{"step": step, "text": "é" * n} for step in (1, 2) for n in range(4)]
    file = tmp_path / "samples.jsonl"
    assert runs.last_samples(file) == []
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + '\n{"st')
    assert runs.last_samples(file) == rows[4:]
    file.write_text(json.dumps(rows[0]))
    assert runs.last_samples(file) == rows[:1]


def test_the_last_rows_are_read_from_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runs, "BLOCK", 7)
    file = tmp_path / "metrics.jsonl"
    assert runs.last_rows(file, 3) == []
    rows = [{"step": number} for number in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 2')
    assert runs.last_rows(file, 3) == rows[-3:] and runs.last_rows(file, 50) == rows
