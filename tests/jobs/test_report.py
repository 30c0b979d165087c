"""The report page of a run, and the list of runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil

from skyrl_actors.jobs.recorder import MemoryWatch
from skyrl_actors.jobs.report import shown, write_page
from skyrl_actors.observe.process import SERVICE_VARIABLE
from skyrl_actors.observe.runs import listed

CONFIG = "job: {type: grpo, seed: 7}\nrun: {name: x}\n"
HOLD = "import sys; x = bytearray(300 * 2**20); print('ready', flush=True); sys.stdin.read()"


def run_in(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def test_nested_values_are_shown_as_rows_and_without_python_syntax():
    values = {"best": {"step": 2, "value": 0.46512345}, "resumed_at": None, "cpus": [1, 2]}
    assert shown(values) == {
        "best: step": "2",
        "best: value": "0.465123",
        "resumed at": "–",
        "cpus": "1, 2",
    }


def test_the_page_has_tables_that_scroll_and_no_dictionaries(tmp_path: Path):
    environment = json.dumps({"packages": {"torch": "2.13"}, "machine": {"gpus": []}})
    run = run_in(tmp_path / "a", environment_json=environment)
    page = write_page(run).read_text()
    assert "{'" not in page and "&#39;" not in page and '{"' not in page
    assert "packages: torch" in page and "overflow-x: auto" in page


def test_half_an_emoji_in_an_answer_is_shown_as_a_question_mark(tmp_path: Path):
    row = {"step": 1, "prompt": "q", "answer": "half \ud83d", "reward": 1.0, "correct": "\ud83d"}
    run = run_in(tmp_path / "a", samples_jsonl=json.dumps(row) + "\n")
    assert "half ?" in write_page(run).read_text()


def test_unfinished_runs_show_their_job_and_seed_and_whether_they_began(tmp_path: Path):
    run_in(tmp_path / "failed")
    run_in(tmp_path / "broken", config_yaml="x: [")
    run_in(tmp_path / "stopped", metrics_jsonl='{"step": 3}\n')
    broken, failed, stopped = listed(tmp_path)
    assert (failed["job"], failed["seed"]) == ("grpo", 7) and broken["job"] == ""
    assert failed["state"] == "unfinished, ended before its first step"
    assert stopped["state"] == "unfinished, restarts from 0 (was at step 3)"


def test_peak_memory_counts_the_parts_of_the_own_service_only():
    def holding(service: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD],
            env={**os.environ, SERVICE_VARIABLE: service},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    mine, other = holding("mine"), holding("other")
    try:
        watch = MemoryWatch("mine")
        found = [p.pid for p in psutil.process_iter() if watch._is_of_service(p)]
        assert found == [mine.pid]
    finally:
        for process in (mine, other):
            process.communicate()
