"""`train` and `demo`: start (or join) Ray, run a job as a client of its own controller, end everything."""

import asyncio
import os
import shutil
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import ray

from skyrl_actors.api.client import ControllerClient
from skyrl_actors.commands import cluster
from skyrl_actors.commands.terminal import RunView, bar, closing_table, console, note
from skyrl_actors.config.job import JobConfig
from skyrl_actors.config.load import load, to_yaml
from skyrl_actors.jobs.build import Start, build, steps_of
from skyrl_actors.jobs.trackers import MemoryWatch, RunFolder
from skyrl_actors.jobs.watcher import Outcome


def train(config_path: str | Path, overrides: Sequence[str]) -> Path:
    """Run the job of a config file; returns the run's folder."""
    config = load(config_path, overrides, JobConfig)
    # Jobs beside a service or beside each other must not meet in names or scratch folders.
    name = f"{config.run.name[:24].replace('.', '-')}-{uuid.uuid4().hex[:6]}"
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"name": name})})
    started = time.perf_counter()
    folder = RunFolder(config.run.folder, config.run.name)
    folder.write("config.yaml", to_yaml(config))
    note(f"run folder {folder.path.resolve()}")
    try:
        with MemoryWatch() as memory:
            base_folder = cluster.prepare_base_model(config.cluster)
            start = build(config, str(base_folder), cluster.context_tokens(config.cluster, base_folder))
            outcome, kept = _with_ray(config, base_folder, folder, start)
        _write_results(config, outcome, kept, folder, time.perf_counter() - started, memory.peak_bytes)
    finally:
        folder.close()
    return folder.path


def _with_ray(config: JobConfig, base_folder: Path, folder: RunFolder, start: Start) -> tuple[Outcome, Path]:
    joined = "RAY_ADDRESS" in os.environ
    if joined:
        cluster.join_ray()
    else:
        cluster.start_local_ray(config.cluster)
    try:
        return asyncio.run(_run(config, base_folder, folder, start))
    finally:
        ray.shutdown()
        if not joined:
            cluster.end_children()
        cluster.remove_scratch(config.cluster)


async def _run(config: JobConfig, base_folder: Path, folder: RunFolder, start: Start) -> tuple[Outcome, Path]:
    journal = config.cluster.journal.model_copy(update={"folder": (folder.path / ".journal").resolve()})
    checkpoints = (folder.path / ".checkpoints").resolve()
    restart = config.cluster.restart.model_copy(update={"standbys": 0})  # a job can wait for a rank's start
    scratch = config.cluster.model_copy(update={"checkpoint_dir": checkpoints, "journal": journal, "restart": restart})
    controller = cluster.create_controller(scratch, base_folder, detached=False)
    try:
        await cluster.wait_until_started(controller)
        with bar(config.job.type, steps_of(config)) as progress:
            client = ControllerClient(controller)
            outcome = await start(client, RunView(folder, progress)).run()
        status = await client.status()
        folder.write("status.json", _as_json(status))
        kept = folder.path / "checkpoint"
        os.replace(outcome.checkpoint, kept)
        return outcome, kept
    finally:
        await cluster.close_controller(controller)
        for name in (".checkpoints", ".journal"):
            shutil.rmtree(folder.path / name, ignore_errors=True)


def _as_json(content: object) -> str:
    import json

    return json.dumps(content, indent=2) + "\n"


def _write_results(
    config: JobConfig, outcome: Outcome, checkpoint: Path, folder: RunFolder, seconds: float, peak_bytes: int
) -> None:
    peak_gib = peak_bytes / 2**30
    folder.report(f"{config.run.name} ({config.job.type}): {outcome.metric} {outcome.before:.3f} → {outcome.after:.3f}")
    folder.summary(
        {
            "job": config.job.type,
            "metric": outcome.metric,
            "metric_before": outcome.before,
            "metric_after": outcome.after,
            "steps": outcome.steps,
            "seed": config.job.seed,
            "seconds": round(seconds, 1),
            "peak_rss_gib": round(peak_gib, 2),
            "checkpoint": checkpoint.name,
        }
    )
    closing_table(outcome, seconds, peak_gib, folder)
    if config.job.type != "reward_model" and config.job.lora_rank is None:
        console.print(f"load the trained model: AutoModelForCausalLM.from_pretrained({str(checkpoint)!r})")
