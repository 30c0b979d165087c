"""Jobs: training programs that run as clients of the controller."""

from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field, model_validator

from skyrl_actors.config.algorithms import (
    Advantage,
    AlgorithmName,
    BaseReference,
    ClippedLoss,
    Correction,
    Gae,
    KlTerm,
    MovingReference,
    NoCorrection,
    NoFilter,
    NoKl,
    Overlong,
    PolicyLoss,
    Reduction,
    Reference,
    SamplingFilter,
    with_preset,
)
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.environments import Environment, ReverseEnv
from skyrl_actors.config.frozen import FrozenConfig
from skyrl_actors.config.job_fields import EPOCHS, EVAL_EVERY, JobFields
from skyrl_actors.config.schedules import Asynchronous, OnPolicy, Schedule
from skyrl_actors.config.supervised import DpoConfig, RewardModelConfig, SftConfig
from skyrl_actors.config.trackers import Tracker


class RlConfig(JobFields):
    """Reinforcement learning.

    `type` names an algorithm, which is a choice of the parts below. Each part can also be set
    separately.
    """

    type: AlgorithmName = "ppo"
    env: Environment = ReverseEnv()
    iterations: int = Field(default=40, ge=1, description="number of iterations")
    stop_at_accuracy: float | None = Field(
        default=None,
        description="end the run when the mean reward of greedy answers to held-out prompts "
        "reaches this; null = never",
    )
    eval_every: int = Field(default=5, ge=1, description=EVAL_EVERY)
    prompts: int = Field(default=64, ge=1, description="number of prompts in an iteration")
    samples_per_prompt: int = Field(default=4, ge=1, description="number of answers to each prompt")
    max_tokens: int = Field(
        default=12,
        ge=1,
        description="longest answer; with several turns, the longest answer of each turn",
    )
    stop: tuple[str, ...] = Field(
        default=(),
        description="texts that end an answer, in addition to the end token of the model; "
        "for example </search> in an environment with tools",
    )
    temperature: float = Field(
        default=1.0,
        gt=0,
        le=2.0,
        description="sampling temperature; without `processed_logprobs` the policy is trained at "
        "temperature 1, so set `correction` or `processed_logprobs` for another value",
    )
    top_k: int = Field(
        default=-1, ge=-1, description="sample from the top_k most likely tokens; -1 = all tokens"
    )
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="sample from the most likely tokens that have this probability together",
    )
    processed_logprobs: bool = Field(
        default=False,
        description="train in the distribution that samples come from: logprobs, ratios, "
        "divergence and entropy at `temperature`, restricted by top_k and top_p. Ratios are then "
        "1 on policy",
    )
    advantage: Advantage = Gae()
    kl: KlTerm = Field(
        default=NoKl(), description="the penalty for divergence of the policy from the reference"
    )
    policy_loss: PolicyLoss = ClippedLoss()
    reduction: Reduction = Reduction()
    filter: SamplingFilter = Field(default=NoFilter(), description="which prompts are trained on")
    overlong: Overlong = Overlong()
    correction: Correction = Field(
        default=NoCorrection(),
        description="a weight of the loss for samples from the engine, from older weights or at "
        "another temperature. It is computed from r = exp(log p_trainer − log p_engine). log "
        "p_engine is the log-probability under the distribution that was sampled from. log "
        "p_trainer is the log-probability at temperature 1, or with `processed_logprobs` in the "
        "same distribution",
    )
    reference: Reference = Field(
        default=BaseReference(), description="the model that the divergence is measured from"
    )
    schedule: Schedule = OnPolicy()
    entropy_coef: float = Field(
        default=0.0,
        ge=0,
        description="weight of the mean token entropy of a minibatch, "
        "which is added to the objective",
    )
    epochs: int = Field(default=2, ge=1, description=EPOCHS)
    minibatches: int = Field(default=4, ge=1, description="optimizer steps of an epoch")
    critic_lr: float = Field(default=1e-3, gt=0, description="initial learning rate of the critic")
    value_clip: float = Field(
        default=0.2, gt=0, description="largest change of a value in the clipped value loss"
    )
    mismatch_stop: float | None = Field(
        default=None,
        gt=0,
        description="end the run if engine and trainer differ by more than this, as the mean of "
        "|Δ logprob| over the sampled tokens; null = never",
    )
    critic_warmup: int = Field(
        default=1,
        ge=0,
        description="number of initial iterations in which only the critic is trained",
    )

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        return with_preset(cast("dict[str, Any]", given)) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _agrees(self) -> "RlConfig":
        needs_group = (
            self.advantage.type in ("group", "leave_one_out") or self.filter.type == "varied"
        )
        needs_group |= getattr(self.advantage, "baseline", "none") == "group"
        if needs_group and self.samples_per_prompt < 2:
            raise ValueError(
                f"{self.type} compares the answers to one prompt: set samples_per_prompt to 2 or "
                "more (it is 1)"
            )
        if self.overlong.buffer_tokens > self.max_tokens:
            raise ValueError(
                f"overlong.buffer_tokens {self.overlong.buffer_tokens} is above max_tokens "
                f"{self.max_tokens}"
            )
        if self.advantage.type == "reverse_kl" and self.kl.place != "none":
            raise ValueError(
                "advantage reverse_kl is the divergence from the reference itself: "
                "set kl.place to none"
            )
        if self.advantage.type == "reverse_kl" and self.reference.type != "checkpoint":
            raise ValueError(
                "advantage reverse_kl learns from the reference: set reference.type to checkpoint, "
                "and its path to the teacher's"
            )
        if not self.needs_reference and self.reference.type != "base":
            raise ValueError(
                "reference has no effect, because neither kl nor advantage uses it; leave it out"
            )
        idle = [
            name
            for name in ("critic_lr", "value_clip", "critic_warmup")
            if getattr(self, name) != type(self).model_fields[name].default
        ]
        if idle and not self.uses_critic:
            raise ValueError(
                f"{', '.join(idle)} do nothing without a critic, because advantage is "
                f"{self.advantage.type} and not gae; leave them out"
            )
        if (
            self.stop
            and isinstance(self.schedule, Asynchronous)
            and self.schedule.slice_tokens is not None
        ):
            raise ValueError(
                "a text in stop could be split between two slices of an answer; "
                "leave out schedule.slice_tokens or stop"
            )
        if self.uses_critic and self.critic_warmup >= self.iterations:
            raise ValueError(
                f"the policy would never learn: critic_warmup {self.critic_warmup} takes all of "
                f"{self.iterations} iterations; lower it"
            )
        if self.schedule.type != "on_policy" and self.mismatch_stop is not None:
            raise ValueError(
                "mismatch_stop compares samples with the weights that made them, and schedule "
                f"{self.schedule.type} learns from older ones; leave it out (cluster.logprob_check "
                "compares engine and trainer at every transfer)"
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
        """Number of models like the policy that exist at once.

        A reference from a checkpoint is not counted.
        """
        moves = isinstance(self.reference, MovingReference)
        return 2 if self.needs_reference and moves else 1


Job = Annotated[RlConfig | SftConfig | DpoConfig | RewardModelConfig, Field(discriminator="type")]


class RunConfig(FrozenConfig):
    """The folder of a run and what it keeps.

    An unfinished run with the same name and config is resumed.
    """

    name: str = Field(
        default="run",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,80}$",
        description="name of the run and of its folder",
    )
    folder: Path = Field(default=Path("runs"), description="folder that contains the run's folder")
    resume: Literal["auto", "never"] = Field(
        default="auto",
        description="auto: resume an unfinished run; never: "
        "leave it and start a new one next to it",
    )
    checkpoint_every: int = Field(
        default=10, ge=0, description="steps between checkpoints; 0 = keep only the last weights"
    )
    keep_checkpoints: int = Field(
        default=2, ge=1, description="number of newest checkpoints that are kept"
    )
    trackers: tuple[Tracker, ...] = Field(
        default=(), description="W&B and MLflow, in addition to metrics.jsonl and TensorBoard"
    )

    @model_validator(mode="after")
    def _used(self) -> "RunConfig":
        if (
            not self.checkpoint_every
            and self.keep_checkpoints != type(self).model_fields["keep_checkpoints"].default
        ):
            raise ValueError("keep_checkpoints does nothing while checkpoint_every is 0")
        return self


class JobConfig(FrozenConfig):
    """The whole config of a job."""

    cluster: ClusterConfig
    job: Job = RlConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        """Set `type` to ppo if it is left out."""
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
                f"job.schedule {schedule.type} samples while it learns, and in layout "
                f"{cluster.placement.layout} engines and policy share devices; "
                "set cluster.placement.layout to split, or job.schedule.type to on_policy"
            )
        kept = cluster.limits.full_sampler_versions
        alive = (schedule.max_staleness if isinstance(schedule, Asynchronous) else 1) + 1
        if job.lora_rank is None and alive > kept:
            raise ValueError(
                f"job.schedule uses up to {alive} versions of the policy's weights at once; "
                f"set cluster.limits.full_sampler_versions to {alive} or more (it is {kept}), "
                "or a smaller job.schedule.max_staleness"
            )

    @model_validator(mode="after")
    def _fits(self) -> "JobConfig":
        job, lora = self.job, self.cluster.lora
        if self.cluster.base_models:
            raise ValueError(
                "cluster.base_models: a job trains one base model; set cluster.base_model"
            )
        if self.cluster.shards.count > 1:
            raise ValueError("cluster.shards: a job has one controller; leave shards out")
        if self.cluster.checkpoint_mirror is not None:
            raise ValueError(
                "a job keeps its checkpoints in its run's folder; set run.folder instead of "
                "cluster.checkpoint_mirror"
            )
        if self.cluster.restart.standby_controller:
            raise ValueError(
                "cluster.restart.standby_controller: a job's controller ends with the job; leave "
                "it out"
            )
        if self.cluster.journal.url is not None:
            raise ValueError(
                "a job's journal exists only while it runs, in its run's folder; "
                "leave out cluster.journal.url"
            )
        critic = (
            job.uses_critic if isinstance(job, RlConfig) else isinstance(job, RewardModelConfig)
        )
        if critic and self.cluster.critic is None:
            raise ValueError(f"{job.type} needs a critic group: set cluster.critic")
        if isinstance(job, RlConfig):
            if job.max_tokens >= self.cluster.engine.max_model_len:
                raise ValueError(
                    f"job.max_tokens {job.max_tokens} leaves no tokens for a prompt, because "
                    f"cluster.engine.max_model_len is {self.cluster.engine.max_model_len}"
                )
            if job.samples_per_prompt > self.cluster.samples_in_flight:
                raise ValueError(
                    f"job.samples_per_prompt {job.samples_per_prompt} is above "
                    f"cluster.limits.samples_in_flight {self.cluster.samples_in_flight}"
                )
            self._can_sample_beside_learning(job)
        if job.lora_rank is not None and job.lora_rank > lora.max_rank:
            raise ValueError(
                f"job.lora_rank {job.lora_rank} is above cluster.lora.max_rank {lora.max_rank}"
            )
        begins = isinstance(job, DpoConfig) and job.init_from is not None  # with a reference
        full = job.num_models if isinstance(job, RlConfig) else 1 + begins
        if job.lora_rank is None and lora.max_full_models < full:
            raise ValueError(
                "job.lora_rank null is a full fine-tune: set cluster.lora.max_full_models to "
                f"{full} or more"
            )
        return self
