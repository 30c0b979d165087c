"""The job that a config names. What it reads (datasets, reward functions, environments) is read and checked before anything starts."""

from collections.abc import Callable
from typing import Protocol

from skyrl_actors.api.client import ControllerClient
from skyrl_actors.config.environments import CustomEnv, GymEnv, RewardEnv
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
from skyrl_actors.jobs.watcher import Outcome, Watcher


class Job(Protocol):
    async def run(self) -> Outcome: ...


Start = Callable[[ControllerClient, Watcher, Checkpoints], Job]


def build(config: JobConfig, base_folder: str, context_tokens: int) -> Start:
    """Raises ConfigError for data or functions that can not be used. `context_tokens`: of the base model."""
    job, alpha = config.job, config.cluster.lora.alpha
    chat = Chat(base_folder)
    if isinstance(job, RlConfig):
        tasks = _tasks(job)
        return lambda client, watcher, kept: RlJob(client, job, tasks, chat, watcher, kept, alpha)
    if isinstance(job, SftConfig):
        texts = sft_texts(job, chat, context_tokens)
        return lambda client, watcher, kept: SftJob(client, job, texts, watcher, kept, alpha)
    pairs = preference_texts(job, chat, context_tokens)
    if isinstance(job, DpoConfig):
        return lambda client, watcher, kept: DpoJob(client, job, pairs, watcher, kept, alpha)
    return lambda client, watcher, kept: RewardModelJob(client, job, pairs, watcher, kept, alpha)


def _tasks(job: RlConfig) -> TaskSet:
    if isinstance(job.env, RewardEnv):
        return reward_tasks(job.env, job.seed)
    if isinstance(job.env, GymEnv):
        return gym_tasks(job.env, job.seed)
    if isinstance(job.env, CustomEnv):
        return custom_tasks(job.env, job.seed)
    return ReverseTasks(job.env, job.seed)


def steps_of(config: JobConfig) -> int | None:
    """For a progress bar; None where only the data tells."""
    return config.job.iterations if isinstance(config.job, RlConfig) else config.job.max_steps
