"""The parts of an RL algorithm, and the named algorithms.

A named algorithm is a choice of parts. The config can change each part.
"""

from typing import Annotated, Any, Literal, cast

from pydantic import Field, model_validator

from skyrl_actors.config.frozen import FrozenConfig

AlgorithmName = Literal[
    "ppo",
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "dapo",
    "cispo",
    "gspo",
    "distill",
]


class Gae(FrozenConfig):
    """Generalized advantage estimation with a critic (Schulman et al., 2016, eq. 16)."""

    type: Literal["gae"] = "gae"
    gamma: float = Field(default=1.0, gt=0, le=1, description="discount for each token")
    gae_lambda: float = Field(default=0.95, ge=0, le=1, description="λ of eq. 16")
    whiten: bool = Field(
        default=True,
        description="shift and scale the advantages of a batch to mean 0 and standard deviation 1",
    )


class GroupAdvantage(FrozenConfig):
    """The reward of an answer minus the mean reward of all answers to the same prompt."""

    type: Literal["group"] = "group"
    by_std: bool = Field(
        default=True, description="divide by the standard deviation of these rewards"
    )


class LeaveOneOut(FrozenConfig):
    """The reward of an answer minus the mean reward of the other answers to the same prompt.

    RLOO (Ahmadian et al., 2024).
    """

    type: Literal["leave_one_out"] = "leave_one_out"


class ReturnAdvantage(FrozenConfig):
    """The discounted sum of later rewards, whitened over the batch (REINFORCE++; Hu, 2025)."""

    type: Literal["return"] = "return"
    gamma: float = Field(default=1.0, gt=0, le=1, description="discount for each token")
    baseline: Literal["none", "group"] = Field(
        default="none",
        description="group: first subtract the mean reward of the answers to the prompt",
    )


class ReverseKl(FrozenConfig):
    """log p_teacher − log p at each token: on-policy distillation (Agarwal et al., 2024).

    Rewards are not used.
    """

    type: Literal["reverse_kl"] = "reverse_kl"


Advantage = Annotated[
    Gae | GroupAdvantage | LeaveOneOut | ReturnAdvantage | ReverseKl, Field(discriminator="type")
]


class KlTerm(FrozenConfig):
    """The penalty for divergence of the policy from the reference.

    In the reward, every estimator is allowed. In the loss, k2 and k3 are allowed.
    """

    place: Literal["none", "reward", "loss"] = Field(
        default="none", description="where the penalty is added"
    )
    estimator: Literal["k1", "k2", "k3"] = Field(
        default="k1", description="estimator of the divergence (Schulman, 2020)"
    )
    coef: float = Field(
        default=0.0, ge=0, description="weight of the penalty; the start value if `target` is set"
    )
    target: float | None = Field(
        default=None,
        gt=0,
        description="KL per token that the coefficient is adjusted to reach (Ziegler et al., "
        "2019); null = constant coefficient",
    )
    horizon: int = Field(
        default=10_000,
        ge=1,
        description="number of samples in which the coefficient can change by a "
        "factor of about e^0.2",
    )

    @model_validator(mode="after")
    def _usable(self) -> "KlTerm":
        if self.place == "loss" and self.estimator == "k1":
            raise ValueError(
                "estimator k1 has no gradient in expectation as a term of the loss; "
                "use k2 or k3, or place: reward"
            )
        if self.place != "none" and self.coef == 0:
            raise ValueError(
                f"place {self.place} with coef 0 does nothing; set coef, or place: none"
            )
        if self.place == "none" and (self.coef or self.target is not None):
            raise ValueError(
                "coef and target do nothing while place is none; set place to reward or loss"
            )
        if self.target is None and self.horizon != KlTerm.model_fields["horizon"].default:
            raise ValueError(
                "horizon has an effect only with target; set target, or leave out horizon"
            )
        return self


class PpoLoss(FrozenConfig):
    """The clipped loss of PPO (see [Losses](losses.md))."""

    type: Literal["ppo"] = "ppo"
    clip_low_threshold: float = Field(
        default=0.8, gt=0, lt=1, description="lower bound of the ratio"
    )
    clip_high_threshold: float = Field(default=1.2, gt=1, description="upper bound of the ratio")


class CispoLoss(FrozenConfig):
    """CISPO (see [Losses](losses.md))."""

    type: Literal["cispo"] = "cispo"
    clip_low_threshold: float = Field(
        default=0.0, ge=0, lt=1, description="lower bound of the weight"
    )
    clip_high_threshold: float = Field(default=4.0, gt=1, description="upper bound of the weight")


class GspoLoss(FrozenConfig):
    """GSPO, token variant (see [Losses](losses.md))."""

    type: Literal["gspo"] = "gspo"
    clip_low_threshold: float = Field(
        default=1 - 3e-4, gt=0, lt=1, description="lower bound of the sequence ratio"
    )
    clip_high_threshold: float = Field(
        default=1 + 4e-4, gt=1, description="upper bound of the sequence ratio"
    )


class DppoLoss(FrozenConfig):
    """DPPO with the binary total variation (see [Losses](losses.md))."""

    type: Literal["dppo"] = "dppo"
    delta_low: float = Field(
        default=0.15, gt=0, le=1, description="largest decrease of a token's probability"
    )
    delta_high: float = Field(
        default=0.15, gt=0, le=1, description="largest increase of a token's probability"
    )


class ImportanceSamplingLoss(FrozenConfig):
    """Policy gradient with importance weights, not clipped (see [Losses](losses.md))."""

    type: Literal["importance_sampling"] = "importance_sampling"


PolicyLoss = Annotated[
    PpoLoss | CispoLoss | GspoLoss | DppoLoss | ImportanceSamplingLoss, Field(discriminator="type")
]


class Reduction(FrozenConfig):
    """How the token losses of a minibatch are reduced to one number.

    `token_mean`: the mean over all tokens. `sequence_mean`: the mean over answers of each answer's
    token mean (GRPO). `fixed`: the sum over an answer's tokens divided by max_tokens ·
    env.max_turns, then the mean over answers (Dr. GRPO; Liu et al., 2025). With `fixed`, the length
    of an answer does not change the weight of its tokens.
    """

    type: Literal["token_mean", "sequence_mean", "fixed"] = "token_mean"


class Correction(FrozenConfig):
    """A correction for samples from the engine, from older weights or at another temperature.

    The loss is multiplied by a weight computed from r = exp(log p_trainer − log p_engine). log
    p_engine is the log-probability under the distribution that was sampled from. log p_trainer is
    the log-probability at temperature 1. `truncated`: the weight is min(r, high) (Yao et al.,
    2025). `masked`: the weight is r, or 0 if r is outside low … high.
    """

    type: Literal["none", "truncated", "masked"] = "none"
    level: Literal["token", "sequence"] = Field(
        default="token",
        description="compute r for each token, "
        "or for a whole answer from the mean of its differences",
    )
    low: float = Field(
        default=0.5, gt=0, lt=1, description="smallest r that counts; only for type masked"
    )
    high: float = Field(
        default=2.0,
        gt=1,
        description="largest r that counts (masked), or upper bound of r (truncated)",
    )

    @model_validator(mode="after")
    def _used(self) -> "Correction":
        defaults = Correction.model_fields
        if self.type == "none" and (self.level, self.low, self.high) != (
            "token",
            defaults["low"].default,
            defaults["high"].default,
        ):
            raise ValueError(
                "level, low and high do nothing while type is none; set type to truncated or masked"
            )
        if self.type == "truncated" and self.low != defaults["low"].default:
            raise ValueError(
                "low has an effect only with type masked; set type to masked, or leave out low"
            )
        return self


class Overlong(FrozenConfig):
    """How answers that are cut at max_tokens are treated."""

    cut_answers: Literal["zero", "score", "mask"] = Field(
        default="zero",
        description="zero: the reward is 0; score: scored like other answers; "
        "mask: scored, but not trained on",
    )
    buffer_tokens: int = Field(
        default=0,
        ge=0,
        description="length of the range before max_tokens in which a penalty rises linearly to "
        "`penalty` (DAPO, eq. 13); 0 = off",
    )
    penalty: float = Field(default=1.0, ge=0, description="largest penalty; needs buffer_tokens")

    @model_validator(mode="after")
    def _used(self) -> "Overlong":
        if not self.buffer_tokens and self.penalty != 1.0:
            raise ValueError(
                "penalty does nothing while buffer_tokens is 0; set buffer_tokens, "
                "or leave out penalty"
            )
        return self


class SamplingFilter(FrozenConfig):
    """Which prompts are trained on.

    `varied`: prompts whose answers all have the same reward are left out, because they have no
    gradient. Further prompts are sampled instead (DAPO's dynamic sampling).
    """

    type: Literal["none", "varied"] = "none"
    max_batches: int = Field(
        default=5,
        ge=1,
        description="largest number of batches sampled for one iteration; "
        "after that it continues with fewer prompts",
    )

    @model_validator(mode="after")
    def _used(self) -> "SamplingFilter":
        if self.type == "none" and self.max_batches != 5:
            raise ValueError(
                "max_batches has an effect only with type varied; set type to varied, "
                "or leave out max_batches"
            )
        return self


class Reference(FrozenConfig):
    """The model that the divergence is measured from.

    `base`: the base model. `checkpoint`: a checkpoint. `periodic`: a copy of the policy from an
    earlier iteration. `ema`: the exponential moving average of the policy's weights, reference ←
    decay · reference + (1 − decay) · policy (WARP; Ramé et al., 2024).
    """

    type: Literal["base", "checkpoint", "periodic", "ema"] = "base"
    path: str | None = Field(
        default=None,
        description="type checkpoint: the checkpoint folder of a run, or tinker://<model "
        "id>/weights/<name> in cluster.checkpoint_dir",
    )
    every: int | None = Field(
        default=None,
        ge=1,
        description="types periodic and ema: iterations between updates of the reference; "
        "null = 10 for periodic, 1 for ema",
    )
    decay: float = Field(
        default=0.99, gt=0, lt=1, description="type ema: weight of the old average"
    )

    @property
    def moves(self) -> bool:
        return self.type in ("periodic", "ema")

    @property
    def interval(self) -> int:
        return self.every or (10 if self.type == "periodic" else 1)

    @model_validator(mode="after")
    def _used(self) -> "Reference":
        if self.every is not None and not self.moves:
            raise ValueError(
                "every has an effect only with type periodic or ema; "
                "set the type, or leave out every"
            )
        if self.decay != Reference.model_fields["decay"].default and self.type != "ema":
            raise ValueError(
                "decay has an effect only with type ema; set type to ema, or leave out decay"
            )
        if (self.path is None) == (self.type == "checkpoint"):
            raise ValueError("type checkpoint needs path, and no other type takes it")
        return self


_KL_K1: dict[str, Any] = {"place": "reward", "estimator": "k1", "coef": 0.01}
_GROUP: dict[str, Any] = {"type": "group"}
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    # Schulman et al., 2017, with a KL penalty at each token (Ouyang et al., 2022)
    "ppo": {"advantage": {"type": "gae"}, "kl": _KL_K1},
    # DeepSeekMath (Shao et al., 2024): the divergence is in the loss; each answer has the same
    # weight
    "grpo": {
        "advantage": _GROUP,
        "kl": {"place": "loss", "estimator": "k3", "coef": 0.01},
        "reduction": {"type": "sequence_mean"},
    },
    # Liu et al., 2025: no division by the deviation or the length
    "dr_grpo": {"advantage": {"type": "group", "by_std": False}, "reduction": {"type": "fixed"}},
    "rloo": {"advantage": {"type": "leave_one_out"}, "kl": _KL_K1},
    "reinforce_pp": {"advantage": {"type": "return"}, "kl": _KL_K1},
    "reinforce_pp_baseline": {
        "advantage": {"type": "return", "baseline": "group"},
        "kl": {"place": "loss", "estimator": "k2", "coef": 0.01},
    },
    # Yu et al., 2025: clip-higher, token mean, dynamic sampling, overlong penalty, no divergence
    "dapo": {
        "advantage": _GROUP,
        "policy_loss": {"type": "ppo", "clip_high_threshold": 1.28},
        "filter": {"type": "varied"},
        "overlong": {"cut_answers": "score"},
    },
    "cispo": {"advantage": _GROUP, "policy_loss": {"type": "cispo"}},  # MiniMax-M1, 2025
    # Zheng et al., 2025
    "gspo": {
        "advantage": _GROUP,
        "policy_loss": {"type": "gspo"},
        "reduction": {"type": "sequence_mean"},
    },
    "distill": {
        "advantage": {"type": "reverse_kl"},
        "policy_loss": {"type": "importance_sampling"},
    },
}


DAPO_TOKENS = 12  # the default of RlConfig.max_tokens
# For samples from older weights, the ratio is clipped around the current policy, and min(r, high)
# weights the difference between the current policy and the one that sampled (decoupled PPO; Hilton
# et al., 2022; Fu et al., 2025).
STALE_CORRECTION = {"type": "truncated"}


def with_preset(given: dict[str, Any]) -> dict[str, Any]:
    """Return the config with the parts of its algorithm as defaults.

    A given part of another type replaces the whole part of the preset.
    """
    merged = dict(given)
    for part, preset in PRESETS.get(str(given.get("type", "ppo")), {}).items():
        own: Any = given.get(part, {})
        if isinstance(own, dict):
            own = cast("dict[str, Any]", own)
            other = "type" in own and own["type"] != preset.get("type", own["type"])
            off = part == "kl" and own.get("place") == "none"
            merged[part] = own if other or off else {**preset, **own}
    if given.get("type") == "dapo" and isinstance(merged.get("overlong"), dict):
        longest = given.get("max_tokens", DAPO_TOKENS)
        # the paper uses 4,096 of 20,480 tokens
        buffer = max(1, longest // 5) if isinstance(longest, int) else 1
        merged["overlong"] = {"buffer_tokens": buffer, **cast("dict[str, Any]", merged["overlong"])}
    schedule: Any = given.get("schedule", {})
    if (
        isinstance(schedule, dict)
        and cast("dict[str, Any]", schedule).get("type", "on_policy") != "on_policy"
    ):
        merged.setdefault("correction", STALE_CORRECTION)
    return merged
