"""Build a job from its config.

Datasets, reward functions and environments are read and checked here, before a service starts.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from skyrl_actors.api.client import ControllerClient
from skyrl_actors.config.environments import CustomEnv, GymEnv, ReverseEnv, RewardEnv
from skyrl_actors.config.job import JobConfig, RlConfig
from skyrl_actors.config.supervised import DpoConfig, SftConfig
from skyrl_actors.jobs.chat import Chat
from skyrl_actors.jobs.checkpoints import Checkpoints
from skyrl_actors.jobs.dataset_tasks import custom_tasks, gym_tasks, reward_tasks
from skyrl_actors.jobs.environment import TaskSet
from skyrl_actors.jobs.envs import ReverseTasks
from skyrl_actors.jobs.preferences import DpoJob, RewardModelJob
from skyrl_actors.jobs.rl import RlJob
from skyrl_actors.jobs.sft import SftJob
from skyrl_actors.jobs.texts import preference_texts, sft_texts
from skyrl_actors.jobs.trial import Run, try_tasks
from skyrl_actors.jobs.watcher import RunOutcome, Watcher


class Job(Protocol):
    """A training job that runs to its end."""

    async def run(self) -> RunOutcome: ...


Start = Callable[[ControllerClient, Watcher, Checkpoints], Job]


def build(
    config: JobConfig, base_folder: str, context_tokens: int, run: Run = asyncio.run
) -> Start:
    """Return a function that creates the job.

    `context_tokens` is the context length of the base model. `run` tries tasks in the job's loop.

    Raises:
        ConfigError: Data or functions cannot be used.
    """
    job, alpha = config.job, config.cluster.lora.alpha
    chat = Chat(base_folder, job.chat_template_kwargs, config.cluster.limits)
    if isinstance(job, RlConfig):
        tasks = _tasks(job)
        try_tasks(tasks, chat, job.env.timeout_s, _code_of(job.env), run)
        return lambda client, watcher, checkpoints: RlJob(
            client, job, tasks, chat, watcher, checkpoints, alpha
        )
    if isinstance(job, SftConfig):
        texts = sft_texts(job, chat, context_tokens)
        return lambda client, watcher, checkpoints: SftJob(
            client, job, texts, watcher, checkpoints, alpha
        )
    pairs = preference_texts(job, chat, context_tokens)
    if isinstance(job, DpoConfig):
        return lambda client, watcher, checkpoints: DpoJob(
            client, job, pairs, watcher, checkpoints, alpha
        )
    return lambda client, watcher, checkpoints: RewardModelJob(
        client, job, pairs, watcher, checkpoints, alpha
    )


def _tasks(job: RlConfig) -> TaskSet:
    if isinstance(job.env, RewardEnv):
        return reward_tasks(job.env, job.seed)
    if isinstance(job.env, GymEnv):
        return gym_tasks(job.env, job.seed)
    if isinstance(job.env, CustomEnv):
        return custom_tasks(job.env, job.seed)
    return ReverseTasks(job.env, job.seed)


def _code_of(env: RewardEnv | GymEnv | CustomEnv | ReverseEnv) -> str:
    """Return the key and the value that name the user's code."""
    if isinstance(env, RewardEnv):
        return f"env.reward {env.reward}, called with (prompt, completion, row),"
    if isinstance(env, GymEnv):
        return f"env.id {env.id}"
    return f"env.tasks {env.tasks}" if isinstance(env, CustomEnv) else "the task reverse"


def steps_of(config: JobConfig) -> int | None:
    """Return the number of steps for a progress bar, or None if it depends on the data."""
    return config.job.iterations if isinstance(config.job, RlConfig) else config.job.max_steps
