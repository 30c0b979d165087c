"""Fit the cluster of a job to what the job uses, for `train` and `plan`."""

from skyrl_actors.config.cluster import VLLM_LORA_RANKS, ClusterConfig
from skyrl_actors.config.job import JobConfig, RlConfig
from skyrl_actors.config.supervised import RewardModelConfig


def fitted(config: JobConfig) -> tuple[JobConfig, list[str]]:
    """Return the config without parts that the job does not use, and what was left out.

    A job with adapters trains no full model, and its adapters have one rank.
    """
    job, cluster, notes = config.job, config.cluster, list[str]()
    uses_critic = (
        job.uses_critic if isinstance(job, RlConfig) else isinstance(job, RewardModelConfig)
    )
    if cluster.critic is not None and not uses_critic:
        notes.append(f"{job.type} has no critic, so cluster.critic is not started")
        cluster = cluster.model_copy(update={"critic": None})
    # a checkpoint as the reference may be a full model, or have another rank
    other = isinstance(job, RlConfig) and job.reference.type == "checkpoint"
    if job.lora_rank is not None and not other:
        cluster = _with_lora(cluster, job.lora_rank)
    return config.model_copy(update={"cluster": cluster}), notes


def _with_lora(cluster: ClusterConfig, rank: int) -> ClusterConfig:
    update = {"max_full_models": 0, "max_rank": engine_rank(rank)}
    return cluster.model_copy(update={"lora": cluster.lora.model_copy(update=update)})


def engine_rank(rank: int) -> int:
    """Return the least rank with which an engine can start and that this rank fits."""
    return next(each for each in VLLM_LORA_RANKS if each >= min(rank, VLLM_LORA_RANKS[-1]))
