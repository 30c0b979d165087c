"""`init`: write a project to start from: a config, a reward function and data."""

import json
import random
from pathlib import Path

from skyrl_actors.commands.terminal import note
from skyrl_actors.messages.errors import ConfigError

LETTERS = "abcdefghijkl"
ROWS = 4000
JOB = """\
# A training job. Every key: docs/reference/config.md, or `skyrl-actors train --help`.
cluster:
  extends: configs/cpu_tiny.yaml  # a tiny model, made at the first start; shipped with the package
  critic: null
job:
  type: grpo
  env:
    type: reward
    data: {path: data/questions.jsonl}
    eval_prompts: 200            # the last rows, which are not trained on
    prompt_column: prompt
    answer_column: completion    # shown beside samples
    reward: rewards.py:score
  samples_per_prompt: 8
  prompts: 32
  iterations: 40
  stop_at_accuracy: 0.9
run:
  name: my_job
"""
SERVICE = """\
# A service for scripts that use the tinker SDK.
extends: configs/cpu_tiny.yaml
"""
REWARDS = '''\
"""The reward of the job in job.yaml."""


def score(prompt: str, completion: str, row: dict) -> float:
    """1 for the exact answer, and a part of it for each right letter."""
    right = row["completion"]
    if completion == right:
        return 1.0
    same = sum(a == b for a, b in zip(completion, right))
    return 0.5 * same / max(len(completion), len(right))
'''


def run(folder: Path) -> None:
    """Write the files of a new project. Raises ConfigError if one of them exists."""
    files = {
        "job.yaml": JOB,
        "service.yaml": SERVICE,
        "rewards.py": REWARDS,
        "data/questions.jsonl": _questions(),
    }
    if there := [name for name in files if (folder / name).exists()]:
        raise ConfigError(
            f"{folder} has {', '.join(there)} already; name another folder, and nothing is changed"
        )
    for name, text in files.items():
        file = folder / name
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error.strerror}") from None
        note(f"wrote {file}")
    go = "" if folder.resolve() == Path.cwd() else f"cd {folder} && "
    note(f"try the reward and train:    {go}skyrl-actors train job.yaml")
    real = "job.prompts=128 --model Qwen/Qwen3-0.6B"
    note(f"the same on a real model:    {go}skyrl-actors train job.yaml {real}")
    note(f"a service for the SDK:       {go}skyrl-actors serve service.yaml")


def _questions() -> str:
    rng = random.Random(0)
    words = {"".join(rng.choices(LETTERS, k=rng.randint(3, 5))): None for _ in range(2 * ROWS)}
    rows = [{"prompt": f"Reverse: {word}", "completion": word[::-1]} for word in words][:ROWS]
    return "".join(json.dumps(row) + "\n" for row in rows)
