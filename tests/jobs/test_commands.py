"""Start jobs as users do: from the command line, with Ctrl-C, and with `ray job submit`.

A short run must leave all its files. Ctrl-C is tested in the mixed layout.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.make_data import main as make_data
from skyrl_actors.config.transfers import SHARED_MEMORY
from skyrl_actors.observe.runs import listed
from tests.conftest import ROOT, Service, run_cli

SHORT = (
    "job.iterations=2",
    "job.eval_every=1",
    "job.prompts=16",
    "job.env.eval_prompts=20",
    "cluster.base_model.warmup_steps=10",
)


def check_run_folder(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[2]["sampled_tokens"] == pytest.approx(
        rows[2]["answer_tokens"] * 64
    )  # 16 prompts, 4 samples of each
    assert rows[2]["sample_tokens_per_s"] == pytest.approx(
        rows[2]["sampled_tokens"] / rows[2]["seconds/sample"]
    )
    for key in (
        "reward",
        "kl",
        "value_loss",
        "explained_variance",
        "logprob_mismatch",
        "sample_tokens_per_s",
        "seconds/transfer",
    ):
        assert key in rows[2], key
    assert "clip_fraction" in rows[2] and rows[2]["logprob_mismatch_max"] < 1e-4
    summary = json.loads((run / "summary.json").read_text())
    assert (
        summary["metric"] == "eval/accuracy"
        and 0 <= summary["metric_before"] <= 1
        and 0 <= summary["metric_after"] <= 1
    )
    assert summary["steps"] == 2 and summary["seconds"] > 0
    assert 0.5 < summary["peak_rss_gib"] < 10
    assert (run / "report.png").read_bytes().startswith(b"\x89PNG")
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert {s["step"] for s in samples} == {0, 1, 2} and all(
        s["question"].startswith("Reverse: ") and s["versions"] for s in samples
    )
    assert "iterations: 2" in (run / "config.yaml").read_text()
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("reward")] == [1, 2]
    status = json.loads((run / "status.json").read_text())
    assert (
        status["move_seconds"]["free engine weights"] > 0
        and status["move_seconds"]["load KV cache"] > 0
    )
    assert not [p for p in run.rglob("*") if "partial" in p.name]
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(run / "checkpoint"),
        AutoTokenizer.from_pretrained(run / "checkpoint"),
    )
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Reverse: abc"}], add_generation_prompt=True, tokenize=False
    )
    with torch.no_grad():
        made = model.generate(
            **tokenizer(prompt, return_tensors="pt", add_special_tokens=False),
            max_new_tokens=4,
            do_sample=False,
        )
    assert made.shape[1] > 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("printed", "sent"), [("starting 1 vLLM", signal.SIGINT), ("iter reward", signal.SIGTERM)]
)
def test_an_interrupted_run_cleans_up_and_ray_job_submit_resumes_it(
    service: Service, tmp_path: Path, printed: str, sent: signal.Signals
):
    layout = "mixed" if sent == signal.SIGINT else "colocated"
    options = [
        *SHORT,
        f"cluster.placement.layout={layout}",
        f"run.folder={tmp_path}",
        "run.checkpoint_every=1",
    ]
    begin = ["demo"] if sent == signal.SIGINT else ["train", "configs/jobs/ppo_tiny.yaml"]
    command = [sys.executable, "-m", "skyrl_actors", *begin, *options]
    alone = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    alone["XDG_CACHE_HOME"] = f"{tmp_path}/c"
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=alone
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if printed in line:
                break
        time.sleep(1)
        if sent == signal.SIGTERM:  # the checkpoint is written after the line is printed
            wait_until(lambda: (tmp_path / "ppo_tiny" / "state.json").exists())
        started = psutil.Process(process.pid).children(recursive=True)
        assert {"raylet", "gcs_server"} <= {child.name() for child in started}
        process.send_signal(sent)
        rest = process.stdout.read()
        assert process.wait(60) == 130, rest
    assert "interrupted" in rest
    assert not psutil.wait_procs(started, timeout=5)[1]
    run = tmp_path / "ppo_tiny"
    assert (
        not [p for p in run.rglob("*") if "partial" in p.name] and not (run / ".journal").exists()
    )
    assert (
        (run / ".checkpoints").exists() == (run / "state.json").exists() == (sent == signal.SIGTERM)
    )
    assert not list(SHARED_MEMORY.glob("ppo_tiny-*"))
    if sent == signal.SIGTERM:
        check_resumed(options, run)


@pytest.mark.slow
def test_a_job_with_adapters_on_experts_learns(tmp_path: Path):
    done = run_cli(
        "train",
        "configs/jobs/grpo_tiny_moe.yaml",
        f"run.folder={tmp_path}",
        "job.iterations=3",
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    run = tmp_path / "grpo_tiny_moe"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["metric_after"] >= 1.5 * summary["metric_before"] > 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(row["logprob_mismatch_max"] for row in rows[1:]) < 1e-4
    adapted = json.loads((run / "checkpoint" / "adapter_config.json").read_text())
    assert {"w1", "w2", "w3"} <= set(adapted["target_modules"])


@pytest.mark.slow
def test_a_job_learns_with_jax_where_vllm_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    missing = tmp_path / "first" / "vllm"
    missing.mkdir(parents=True)
    (missing / "__init__.py").write_text("raise ImportError('vllm is not installed')\n")
    monkeypatch.setenv("PYTHONPATH", str(missing.parent))
    done = run_cli(
        "train",
        "configs/jobs/ppo_tiny_jax.yaml",
        f"run.folder={tmp_path}",
        "job.iterations=4",
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    run = tmp_path / "ppo_tiny_jax"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["metric_after"] > summary["metric_before"] + 0.1
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(row["logprob_mismatch_max"] for row in rows[1:]) < 1e-4


@pytest.mark.slow
def test_jobs_learn_from_images_by_sft_and_then_grpo(service: Service, tmp_path: Path):
    make_data(tmp_path / "data", 10, 10)
    done = submitted(
        "train",
        "configs/jobs/sft_shapes.yaml",
        f"job.data.path={tmp_path}/data/shapes.jsonl",
        f"run.folder={tmp_path}",
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    done = submitted(
        "train",
        "configs/jobs/grpo_shapes.yaml",
        f"job.init_from={tmp_path}/sft_shapes",
        f"run.folder={tmp_path}",
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    run = tmp_path / "grpo_shapes"
    summary = json.loads((run / "summary.json").read_text())
    # Where SFT ends depends on how a CPU rounds.
    assert summary["metric_after"] > max(0.9, summary["metric_before"] + 0.04)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(row["logprob_mismatch_max"] for row in rows[1:]) < 1e-4
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert all(row["images"][0].startswith("data:image/png") for row in samples)
    assert samples[0]["images"][0] in (run / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["replica", "jax"])
def test_a_job_replays_the_experts_of_its_samples(tmp_path: Path, strategy: str):
    """The engine computes in bfloat16, so its routers choose others than the trainer's would."""
    done = run_cli(
        "train",
        "configs/jobs/grpo_tiny_moe.yaml",
        f"run.folder={tmp_path}",
        "job.iterations=1",
        "cluster.router_replay=true",
        "cluster.engine.dtype=bfloat16",
        f"cluster.policy.strategy.type={strategy}",
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    metrics = (tmp_path / "grpo_tiny_moe" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(metrics[1])["replayed_share"] == 1


def wait_until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.05)


def check_resumed(options: list[str], run: Path) -> None:
    done = submitted("train", "configs/jobs/ppo_tiny.yaml", *options)
    assert done.returncode == 0 and "resuming an unfinished run after step" in done.stdout, (
        done.stdout[-3000:] + done.stderr[-1000:]
    )
    assert "before" in done.stdout and "after" in done.stdout and "eval/accuracy" in done.stdout
    check_run_folder(run)
    assert json.loads((run / "summary.json").read_text())["resumed_at"] == 1
    assert (
        not (run / "state.json").exists()
        and not (run / ".checkpoints").exists()
        and (run / "checkpoint").is_dir()
    )
    assert [row["state"] for row in listed(run.parent)] == ["finished"]
    page = (run / "report.html").read_text()
    assert (
        "data:image/png;base64," in page
        and "Reverse: " in page
        and 'src="http' not in page
        and 'href="http' not in page
    )


def submitted(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}
    script = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--working-dir", "."]
    command = [*script, "--", "python", "-m", "skyrl_actors", *arguments]
    for _ in range(20):  # Ray's job agent starts some time after Ray itself
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=280, env=environment
        )
        if "No available agent" not in done.stderr + done.stdout:
            break
        time.sleep(2)
    return done


@pytest.mark.slow
def test_jobs_are_clients_of_a_running_service(service: Service, random_base: Path, tmp_path: Path):
    command = [
        sys.executable,
        "-m",
        "tests.jobs.on_service",
        service.name,
        str(random_base),
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 12
    for label, outcome in found.items():
        for metrics in outcome["steps"]:
            assert all(math.isfinite(value) for value in metrics.values()), (label, metrics)
            assert metrics.get("logprob_mismatch_max", 0.0) < 1e-4, (label, metrics)
    assert (
        found["grpo with k2 in the loss"]["steps"][1]["kl"] == 0
    )  # the reference was set to the policy after the first iteration
    kl, of_mean = (
        found["rloo"]["steps"][1]["kl"],
        found["towards a moving average"]["steps"][1]["kl"],
    )
    # The moving average is half way to the policy: the divergence is about a quarter.
    assert kl > 0 and 0 < of_mean < 0.6 * kl
    assert (
        found["gspo over turns"]["steps"][0]["turns"] > 1
        or found["gspo over turns"]["steps"][0]["cut_share"] > 0
    )
    assert found["dapo"]["steps"][0]["batches_drawn"] in (1, 2)
    assert found["distill"]["steps"][0]["kl"] > 0 and "policy_loss" in found["distill"]["steps"][1]
    assert [metrics["staleness"] for metrics in found["one step off"]["steps"]] == [0, 1, 1]
    stale = [metrics["staleness_max"] for metrics in found["asynchronous"]["steps"]]
    assert (
        stale[0] == 0
        and max(stale) == 1
        and "policy_drift" in found["asynchronous"]["steps"][stale.index(1)]
    )
    assert found["sft"]["after"] < 0.9 * found["sft"]["before"]
    assert found["sft, continued"]["before"] == pytest.approx(found["sft"]["after"], rel=1e-5)
    assert (
        found["dpo"]["before"] == pytest.approx(math.log(2), rel=1e-4)
        and found["reward_model"]["before"] == 0.5
    )
    for label in ("dpo", "reward_model"):  # six epochs of the same sixteen pairs
        losses = [metrics["loss"] for metrics in found[label]["steps"]]
        assert (
            losses[0] == pytest.approx(math.log(2), rel=1e-3) and losses[-1] < losses[0] - 0.01
        ), (label, losses)
