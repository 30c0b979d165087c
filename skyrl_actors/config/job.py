"""Training programs that run as clients of the controller."""

from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field, model_validator

from skyrl_actors.config.algorithms import (
    Advantage,
    AlgorithmName,
    Correction,
    Gae,
    KlTerm,
    Overlong,
    PolicyLoss,
    PpoLoss,
    Reduction,
    Reference,
    SamplingFilter,
    with_preset,
)
from skyrl_actors.config.base import FrozenConfig
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.environments import Environment, ReverseEnv
from skyrl_actors.config.optimizer import AdamFields
from skyrl_actors.config.schedules import Asynchronous, OnPolicy, Schedule
from skyrl_actors.config.supervised import DpoConfig, RewardModelConfig, SftConfig
from skyrl_actors.config.trackers import Tracker


class RlConfig(AdamFields):
    """Reinforcement learning. `type` names an algorithm, which is a choice of the parts below; each part may be set by itself."""

    type: AlgorithmName = "ppo"
    env: Environment = ReverseEnv()
    seed: int = Field(default=0, ge=0)
    iterations: int = Field(default=40, ge=1)
    stop_at_accuracy: float | None = Field(
        default=None,
        description="end early once the mean reward of greedy answers to held-out prompts reaches this; none = never",
    )
    eval_every: int = Field(default=5, ge=1)
    prompts: int = Field(default=64, ge=1, description="prompts of an iteration")
    samples_per_prompt: int = Field(default=4, ge=1)
    max_tokens: int = Field(default=12, ge=1, description="of one answer; of each turn where there are several")
    stop: tuple[str, ...] = Field(
        default=(),
        description="texts with which an answer ends, beside the model's own end; </search>, where an environment has tools",
    )
    temperature: float = Field(
        default=1.0,
        gt=0,
        le=2.0,
        description="of samples; the policy that learns is that of temperature 1, so with another set `correction`",
    )
    lora_rank: int | None = Field(default=None, ge=1, description="adapter rank of policy and critic; null = full fine-tune")
    advantage: Advantage = Gae()
    kl: KlTerm = KlTerm()
    policy_loss: PolicyLoss = PpoLoss()
    reduction: Reduction = Reduction()
    filter: SamplingFilter = SamplingFilter()
    overlong: Overlong = Overlong()
    correction: Correction = Correction()
    reference: Reference = Reference()
    schedule: Schedule = OnPolicy()
    entropy_coef: float = Field(
        default=0.0, ge=0, description="of the mean entropy of a minibatch's tokens, added to the objective"
    )
    epochs: int = Field(default=2, ge=1)
    minibatches: int = Field(default=4, ge=1)
    policy_lr: float = Field(default=2e-4, gt=0)
    critic_lr: float = Field(default=1e-3, gt=0)
    value_clip: float = Field(default=0.2, gt=0)
    mismatch_warn: float = Field(
        default=0.05,
        gt=0,
        description="mean |Δ logprob| of engine and trainer on an iteration's samples beyond which it is said; "
        "of samples of the very weights that learn from them",
    )
    mismatch_stop: float | None = Field(default=None, gt=0, description="the same, beyond which the run ends; none = never")
    critic_warmup: int = Field(default=1, ge=0, description="first iterations in which only the critic learns")

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        return with_preset(cast("dict[str, Any]", given)) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _agrees(self) -> "RlConfig":
        needs_group = self.advantage.type in ("group", "leave_one_out") or self.filter.type == "varied"
        needs_group |= getattr(self.advantage, "baseline", "none") == "group"
        if needs_group and self.samples_per_prompt < 2:
            raise ValueError(f"{self.type} compares the answers to one prompt: set samples_per_prompt to 2 or more (it is 1)")
        if self.overlong.buffer_tokens > self.max_tokens:
            raise ValueError(f"overlong.buffer_tokens {self.overlong.buffer_tokens} is above max_tokens {self.max_tokens}")
        if self.advantage.type == "reverse_kl" and self.kl.place != "none":
            raise ValueError("advantage reverse_kl is the divergence from the reference itself: set kl.place to none")
        if self.advantage.type == "reverse_kl" and self.reference.type != "checkpoint":
            raise ValueError(
                "advantage reverse_kl learns from the reference: set reference.type to checkpoint, and its path to the teacher's"
            )
        if not self.needs_reference and self.reference.type != "base":
            raise ValueError("reference is not used: neither kl nor the advantage asks for one")
        idle = [
            name
            for name in ("critic_lr", "value_clip", "critic_warmup")
            if getattr(self, name) != type(self).model_fields[name].default
        ]
        if idle and not self.uses_critic:
            raise ValueError(f"{', '.join(idle)} do nothing without a critic: advantage is {self.advantage.type}, not gae")
        if self.stop and isinstance(self.schedule, Asynchronous) and self.schedule.in_flight == "update":
            raise ValueError("stop could lie across two slices of an answer: set schedule.in_flight to finish, or leave stop out")
        if self.uses_critic and self.critic_warmup >= self.iterations:
            raise ValueError(
                f"the policy would never learn: critic_warmup {self.critic_warmup} takes all of {self.iterations} iterations"
            )
        if self.schedule.type != "on_policy" and self.mismatch_stop is not None:
            raise ValueError(
                f"mismatch_stop compares samples with the very weights that made them, and schedule {self.schedule.type} learns from "
                "older ones: leave it out; cluster.logprob_check compares engine and trainer at every transfer"
            )
        return self

    @property
    def needs_reference(self) -> bool:
        return self.kl.place != "none" or self.advantage.type == "reverse_kl"

    @property
    def uses_critic(self) -> bool:
        return self.advantage.type == "gae"

    @property
    def num_models(self) -> int:
        """Models like the policy that are alive at once. What a checkpoint holds is seen when it is opened."""
        return 2 if self.needs_reference and self.reference.moves else 1


Job = Annotated[RlConfig | SftConfig | DpoConfig | RewardModelConfig, Field(discriminator="type")]


class RunConfig(FrozenConfig):
    """Where a run lies and what it keeps. An unfinished run of the same name and config is gone on with."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,80}$")
    folder: Path = Path("runs")
    resume: Literal["auto", "never"] = Field(
        default="auto", description="never: an unfinished run is left, and a new one made beside it"
    )
    checkpoint_every: int = Field(default=10, ge=0, description="steps; 0 = only the last weights are kept")
    keep_checkpoints: int = Field(default=2, ge=1, description="the newest so many")
    keep_best: bool = Field(default=True, description="the weights of the best evaluation too")
    trackers: tuple[Tracker, ...] = Field(default=(), description="W&B and MLflow, beside metrics.jsonl and TensorBoard")

    @model_validator(mode="after")
    def _used(self) -> "RunConfig":
        if not self.checkpoint_every and self.keep_checkpoints != type(self).model_fields["keep_checkpoints"].default:
            raise ValueError("keep_checkpoints does nothing while checkpoint_every is 0")
        return self


class JobConfig(FrozenConfig):
    cluster: ClusterConfig
    job: Job = RlConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        """`type` may be left out: it is ppo."""
        whole = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
        job = whole.get("job")
        if not isinstance(job, dict):
            return cast("Any", given)
        return {**whole, "job": {"type": "ppo", **cast("dict[str, Any]", job)}}

    def _can_sample_beside_learning(self, job: RlConfig) -> None:
        schedule, cluster = job.schedule, self.cluster
        if schedule.type == "on_policy":
            return
        if cluster.placement.layout != "split" and cluster.engine.num_engines:
            raise ValueError(
                f"job.schedule {schedule.type} samples while it learns, and in layout {cluster.placement.layout} engines and policy take "
                "turns on their devices: set cluster.placement.layout to split, or job.schedule.type to on_policy"
            )
        kept = cluster.limits.full_sampler_versions
        alive = (schedule.max_staleness if isinstance(schedule, Asynchronous) else 1) + 1
        if job.lora_rank is None and alive > kept:
            raise ValueError(
                f"job.schedule uses up to {alive} versions of the policy's weights at once: set cluster.limits.full_sampler_versions to "
                f"{alive} or more (it is {kept}), or a smaller job.schedule.max_staleness"
            )

    @model_validator(mode="after")
    def _fits(self) -> "JobConfig":
        job, lora = self.job, self.cluster.lora
        if self.cluster.checkpoint_mirror is not None:
            raise ValueError("a job keeps its checkpoints in its run's folder: set run.folder, not cluster.checkpoint_mirror")
        if self.cluster.journal.url is not None:
            raise ValueError("a job's journal lives and ends with it, in its run's folder: leave out cluster.journal.url")
        critic = job.uses_critic if isinstance(job, RlConfig) else isinstance(job, RewardModelConfig)
        if critic and self.cluster.critic is None:
            raise ValueError(f"{job.type} needs a critic group: set cluster.critic")
        if isinstance(job, RlConfig):
            if job.max_tokens >= self.cluster.engine.max_model_len:
                raise ValueError(
                    f"job.max_tokens {job.max_tokens} leaves no room for a prompt: cluster.engine.max_model_len is {self.cluster.engine.max_model_len}"
                )
            if job.samples_per_prompt > self.cluster.limits.num_samples:
                raise ValueError(
                    f"job.samples_per_prompt {job.samples_per_prompt} is above cluster.limits.num_samples {self.cluster.limits.num_samples}"
                )
            self._can_sample_beside_learning(job)
        if job.lora_rank is not None and job.lora_rank > lora.max_rank:
            raise ValueError(f"job.lora_rank {job.lora_rank} is above cluster.lora.max_rank {lora.max_rank}")
        full = job.num_models if isinstance(job, RlConfig) else 1
        if job.lora_rank is None and lora.max_full_models < full:
            raise ValueError(f"job.lora_rank null is a full fine-tune: set cluster.lora.max_full_models to {full} or more")
        return self
