"""Run several jobs one after the other on a running service, and print their results as JSON.

This is a separate process, because it joins the service's Ray:
python -m tests.jobs.on_service NAME BASE FOLDER
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from examples.make_data import main as make_data
from skyrl_actors.api.client import ControllerClient, find_controller
from skyrl_actors.commands import cluster
from skyrl_actors.config.job import JobConfig
from skyrl_actors.jobs.build import build
from skyrl_actors.jobs.checkpoints import Checkpoints
from skyrl_actors.jobs.run_folder import open_run

REWARDS = '''
def odd(prompt, completion, row):
    """Return a reward that differs between answers, also for an untrained model."""
    assert prompt == row["prompt"]
    return sum(map(ord, completion)) % 7 / 6
'''
SMALL = {
    "iterations": 2,
    "eval_every": 1,
    "prompts": 4,
    "samples_per_prompt": 2,
    "minibatches": 2,
    "lora_rank": 4,
    "max_tokens": 6,
    "overlong": {"cut_answers": "score"},
}


class RecordingWatcher:
    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.warnings: list[str] = []

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(metrics)

    def evaluated(self, step: int, metrics: dict[str, float], rollouts: Any = ()) -> None:
        pass

    def warned(self, text: str) -> None:
        self.warnings.append(text)


def jobs(folder: Path) -> dict[str, dict[str, Any]]:
    answers, pairs = (
        {"path": f"{folder}/answers.jsonl"},
        {"path": f"{folder}/pairs.jsonl", "limit": 32},
    )
    reward = {
        "type": "reward",
        "data": answers,
        "reward": f"{folder}/rewards.py:odd",
        "eval_prompts": 4,
        "answer_column": "completion",
    }
    gym = {
        "type": "skyrl_gym",
        "id": "gsm8k_multi_turn",
        "data": {"path": f"{folder}/gym.jsonl"},
        "eval_prompts": 2,
        "max_turns": 2,
    }
    learning = {
        "eval_rows": 16,
        "batch_rows": 16,
        "max_steps": 6,
        "lora_rank": 8,
        "learning_rate": 5e-3,
        "eval_every": 6,
    }
    return {
        "rloo": {**SMALL, "type": "rloo", "env": reward},
        "towards a moving average": {
            **SMALL,
            "type": "rloo",
            "env": reward,
            "reference": {"type": "ema", "decay": 0.5},
        },
        "grpo with k2 in the loss": {
            **SMALL,
            "type": "grpo",
            "env": reward,
            "kl": {"estimator": "k2"},
            "entropy_coef": 0.01,
            "reference": {"type": "periodic", "every": 1},
            "correction": {"type": "truncated"},
        },
        "gspo over turns": {**SMALL, "type": "gspo", "env": gym},
        "dapo": {
            **SMALL,
            "type": "dapo",
            "env": reward,
            "filter": {"max_batches": 2},
            "overlong": {"buffer_tokens": 2},
        },
        "one step off": {
            **SMALL,
            "type": "grpo",
            "env": reward,
            "iterations": 3,
            "schedule": {"type": "one_step_off"},
        },
        "asynchronous": {
            **SMALL,
            "type": "rloo",
            "env": reward,
            "iterations": 4,
            "max_tokens": 8,
            "schedule": {
                "type": "asynchronous",
                "max_staleness": 1,
                "slice_tokens": 3,
            },
        },
        "sft": {**learning, "type": "sft", "data": answers},
        "sft, continued": {
            **learning,
            "type": "sft",
            "data": answers,
            "init_from": "from sft",
        },
        "distill": {
            **SMALL,
            "type": "distill",
            "env": reward,
            "reference": {"type": "checkpoint", "path": "from sft"},
        },
        "dpo": {**learning, "type": "dpo", "data": pairs, "epochs": 6, "learning_rate": 2e-3},
        "reward_model": {
            **learning,
            "type": "reward_model",
            "data": pairs,
            "epochs": 6,
            "learning_rate": 2e-3,
        },
    }


async def run(name: str, base: str, folder: Path) -> dict[str, Any]:
    client, found, teacher = ControllerClient(*find_controller(name)), {}, ""
    for label, job in jobs(folder).items():
        # The running service has the layout colocated. Asynchronous jobs are slower in it but give
        # the same results. The config must name `split`, because it refuses them otherwise.
        named = {
            "base_model": {"type": "tiny"},
            "policy": {},
            "critic": {},
            "placement": {"layout": "split"},
        }
        whole = {"cluster": named, "job": job}
        if label == "sft, continued":
            job["init_from"] = teacher
        if label == "distill":
            job["reference"]["path"] = teacher
        config, watcher = JobConfig.model_validate(whole), RecordingWatcher()
        kept = Checkpoints(
            open_run(folder, label.replace(" ", "-"), "job: {}", True), config.run, watcher
        )
        # In a thread, because rewards are tried in an event loop of their own.
        start = await asyncio.to_thread(build, config, base, 512)
        outcome = await start(client, watcher, kept).run()
        where = Path(outcome.checkpoint).parts[-3:]
        teacher = f"tinker://{where[0].replace('_', ':')}/{where[1]}/{where[2]}"
        found[label] = {
            "metric": outcome.metric,
            "before": outcome.before,
            "after": outcome.after,
            "steps": watcher.steps,
            "warnings": watcher.warnings,
        }
    return found


def main(name: str, base: str, folder: Path) -> None:
    make_data(folder, 200, 200)
    (folder / "rewards.py").write_text(REWARDS)
    row = {
        "prompt": [{"role": "user", "content": "1+1"}],
        "reward_spec": {"ground_truth": "2"},
        "extra_info": {"max_turns": 2},
    }
    (folder / "gym.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(8)))
    cluster.join_ray()
    print("\n" + json.dumps(asyncio.run(run(name, base, folder))))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
