"""The adapters that a job asks for."""

from skyrl_actors.config.job_fields import JobFields
from skyrl_actors.messages.model import LoraSpec


def adapter_of(job: JobFields, alpha: float) -> LoraSpec | None:
    """Return the adapter of the job's models, or None for a full fine-tune."""
    if job.lora_rank is None:
        return None
    return LoraSpec(
        rank=job.lora_rank,
        alpha=alpha,
        train_attn=job.train_attn,
        train_mlp=job.train_mlp,
        train_unembed=job.train_unembed,
    )


def untrained_adapter(job: JobFields) -> LoraSpec:
    """Return a small adapter on layers of the job's adapters.

    It is never trained, so its model is equal to the base model. That takes no second copy of the
    weights.
    """
    return LoraSpec(
        rank=1,
        train_attn=job.train_attn,
        train_mlp=job.train_mlp and not job.train_attn,
        train_unembed=not (job.train_attn or job.train_mlp),
    )
