"""The parts an RL algorithm is made of, and the named algorithms: each a choice of parts that the config may change one by one."""

from typing import Annotated, Any, Literal, cast

from pydantic import Field, model_validator

from skyrl_actors.config.base import FrozenConfig

AlgorithmName = Literal[
    "ppo", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "dapo", "cispo", "gspo", "distill"
]


class Gae(FrozenConfig):
    """Generalized advantage estimation with a critic (Schulman et al., 2016, eq. 16)."""

    type: Literal["gae"] = "gae"
    gamma: float = Field(default=1.0, gt=0, le=1)
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    whiten: bool = Field(default=True, description="shift and scale the batch's advantages to mean 0 and deviation 1")


class GroupAdvantage(FrozenConfig):
    """An answer's reward less the mean of its prompt's answers; by_std divides by their deviation."""

    type: Literal["group"] = "group"
    by_std: bool = True


class LeaveOneOut(FrozenConfig):
    """An answer's reward less the mean of the other answers to its prompt (RLOO; Ahmadian et al., 2024)."""

    type: Literal["leave_one_out"] = "leave_one_out"


class ReturnAdvantage(FrozenConfig):
    """Discounted rewards to go, whitened over the batch (REINFORCE++; Hu, 2025); baseline group takes the group's mean off first."""

    type: Literal["return"] = "return"
    gamma: float = Field(default=1.0, gt=0, le=1)
    baseline: Literal["none", "group"] = "none"


class ReverseKl(FrozenConfig):
    """log p_teacher − log p at each token: on-policy distillation (Agarwal et al., 2024). Rewards do not count."""

    type: Literal["reverse_kl"] = "reverse_kl"


Advantage = Annotated[Gae | GroupAdvantage | LeaveOneOut | ReturnAdvantage | ReverseKl, Field(discriminator="type")]


class KlTerm(FrozenConfig):
    """How the policy is held near the reference. In the reward, any estimator; in the loss, k2 or k3."""

    place: Literal["none", "reward", "loss"] = "none"
    estimator: Literal["k1", "k2", "k3"] = "k1"
    coef: float = Field(default=0.0, ge=0)
    target: float | None = Field(
        default=None, gt=0, description="KL a token that the coefficient is steered to (Ziegler et al., 2019); null = it stays"
    )
    horizon: int = Field(
        default=10_000, ge=1, description="samples in which the coefficient may change by a factor of about e^0.2"
    )

    @model_validator(mode="after")
    def _usable(self) -> "KlTerm":
        if self.place == "loss" and self.estimator == "k1":
            raise ValueError("estimator k1 has no gradient in expectation as a term of the loss: use k2 or k3, or place: reward")
        if self.place != "none" and self.coef == 0:
            raise ValueError(f"place {self.place} with coef 0 does nothing: set coef, or place: none")
        if self.place == "none" and (self.coef or self.target is not None):
            raise ValueError("coef and target do nothing while place is none: set place to reward or loss")
        if self.target is None and self.horizon != KlTerm.model_fields["horizon"].default:
            raise ValueError("horizon belongs to target, which is not set")
        return self


class PpoLoss(FrozenConfig):
    type: Literal["ppo"] = "ppo"
    clip_low_threshold: float = Field(default=0.8, gt=0, lt=1)
    clip_high_threshold: float = Field(default=1.2, gt=1)


class CispoLoss(FrozenConfig):
    type: Literal["cispo"] = "cispo"
    clip_low_threshold: float = Field(default=0.0, ge=0, lt=1)
    clip_high_threshold: float = Field(default=4.0, gt=1)


class GspoLoss(FrozenConfig):
    type: Literal["gspo"] = "gspo"
    clip_low_threshold: float = Field(default=1 - 3e-4, gt=0, lt=1)
    clip_high_threshold: float = Field(default=1 + 4e-4, gt=1)


class DppoLoss(FrozenConfig):
    type: Literal["dppo"] = "dppo"
    delta_low: float = Field(default=0.15, gt=0, le=1)
    delta_high: float = Field(default=0.15, gt=0, le=1)


class ImportanceSamplingLoss(FrozenConfig):
    type: Literal["importance_sampling"] = "importance_sampling"


PolicyLoss = Annotated[PpoLoss | CispoLoss | GspoLoss | DppoLoss | ImportanceSamplingLoss, Field(discriminator="type")]


class Reduction(FrozenConfig):
    """How the tokens of a minibatch become one number.

    token_mean: every token weighs the same. sequence_mean: the mean of the answers' means (GRPO). fixed: the sum over an answer's
    tokens divided by max_tokens · env.max_turns, and the mean of those (Dr. GRPO; Liu et al., 2025): no answer's length changes its
    tokens' weight.
    """

    type: Literal["token_mean", "sequence_mean", "fixed"] = "token_mean"


class Correction(FrozenConfig):
    """For samples of another program, older weights or another temperature: r = exp(log p_trainer − log p_engine) multiplies
    the loss. log p_engine is that of the distribution that was sampled from, log p_trainer that of temperature 1.

    truncated: min(r, high) (Yao et al., 2025). masked: r, and 0 where it lies outside low … high. Of a token, or of a whole
    answer by the mean of its differences.
    """

    type: Literal["none", "truncated", "masked"] = "none"
    level: Literal["token", "sequence"] = "token"
    low: float = Field(default=0.5, gt=0, lt=1, description="of type masked")
    high: float = Field(default=2.0, gt=1)

    @model_validator(mode="after")
    def _used(self) -> "Correction":
        defaults = Correction.model_fields
        if self.type == "none" and (self.level, self.low, self.high) != (
            "token",
            defaults["low"].default,
            defaults["high"].default,
        ):
            raise ValueError("level, low and high do nothing while type is none: set type to truncated or masked")
        if self.type == "truncated" and self.low != defaults["low"].default:
            raise ValueError("low belongs to type masked")
        return self


class Overlong(FrozenConfig):
    """Answers that were cut at max_tokens. zero: no reward. score: scored like others. mask: scored, and not learned from."""

    cut_answers: Literal["zero", "score", "mask"] = "zero"
    buffer_tokens: int = Field(
        default=0,
        ge=0,
        description="the last so many tokens before max_tokens cost up to `penalty`, linearly (DAPO, eq. 13); 0 = off",
    )
    penalty: float = Field(default=1.0, ge=0)

    @model_validator(mode="after")
    def _used(self) -> "Overlong":
        if not self.buffer_tokens and self.penalty != 1.0:
            raise ValueError("penalty does nothing while buffer_tokens is 0")
        return self


class SamplingFilter(FrozenConfig):
    """varied: prompts whose answers all have one reward teach nothing and are drawn anew (DAPO's dynamic sampling)."""

    type: Literal["none", "varied"] = "none"
    max_batches: int = Field(default=5, ge=1, description="batches drawn for one iteration before it goes on with fewer prompts")

    @model_validator(mode="after")
    def _used(self) -> "SamplingFilter":
        if self.type == "none" and self.max_batches != 5:
            raise ValueError("max_batches belongs to type varied")
        return self


class Reference(FrozenConfig):
    """What the divergence is measured from: the base model; a checkpoint; the policy itself as it was some iterations ago; or the
    exponential moving average of its weights, reference ← decay · reference + (1 − decay) · policy (WARP; Ramé et al., 2024)."""

    type: Literal["base", "checkpoint", "periodic", "ema"] = "base"
    path: str | None = Field(
        default=None,
        description="of type checkpoint: a run's checkpoint folder, or tinker://<model id>/weights/<name> of cluster.checkpoint_dir",
    )
    every: int | None = Field(
        default=None, ge=1, description="of type periodic and ema: iterations between changes; none = 10, 1"
    )
    decay: float = Field(default=0.99, gt=0, lt=1, description="of type ema")

    @property
    def moves(self) -> bool:
        return self.type in ("periodic", "ema")

    @property
    def interval(self) -> int:
        return self.every or (10 if self.type == "periodic" else 1)

    @model_validator(mode="after")
    def _used(self) -> "Reference":
        if self.every is not None and not self.moves:
            raise ValueError("every belongs to type periodic or ema")
        if self.decay != Reference.model_fields["decay"].default and self.type != "ema":
            raise ValueError("decay belongs to type ema")
        if (self.path is None) == (self.type == "checkpoint"):
            raise ValueError("path belongs to type checkpoint, and only to it")
        return self


_KL_K1: dict[str, Any] = {"place": "reward", "estimator": "k1", "coef": 0.01}
_GROUP: dict[str, Any] = {"type": "group"}
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    # Schulman et al., 2017, with a KL penalty at each token (Ouyang et al., 2022)
    "ppo": {"advantage": {"type": "gae"}, "kl": _KL_K1},
    # DeepSeekMath (Shao et al., 2024): the divergence in the loss, each answer weighs the same
    "grpo": {
        "advantage": _GROUP,
        "kl": {"place": "loss", "estimator": "k3", "coef": 0.01},
        "reduction": {"type": "sequence_mean"},
    },
    # Liu et al., 2025: neither deviation nor length in the denominator
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
    "gspo": {"advantage": _GROUP, "policy_loss": {"type": "gspo"}, "reduction": {"type": "sequence_mean"}},  # Zheng et al., 2025
    "distill": {"advantage": {"type": "reverse_kl"}, "policy_loss": {"type": "importance_sampling"}},
}


DAPO_TOKENS = 12  # RlConfig.max_tokens where none is given
# Samples of older weights: the ratio is clipped around the policy as it is when they are learned from, and min(r, high) weighs what
# lies between that and their own (decoupled PPO; Hilton et al., 2022; Fu et al., 2025).
STALE_CORRECTION = {"type": "truncated"}


def with_preset(given: dict[str, Any]) -> dict[str, Any]:
    """The config with the parts of its algorithm below what was given. A part of another type replaces the preset's whole."""
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
        buffer = max(1, longest // 5) if isinstance(longest, int) else 1  # of 20,480 tokens the paper's has 4,096
        merged["overlong"] = {"buffer_tokens": buffer, **cast("dict[str, Any]", merged["overlong"])}
    schedule: Any = given.get("schedule", {})
    if isinstance(schedule, dict) and cast("dict[str, Any]", schedule).get("type", "on_policy") != "on_policy":
        merged.setdefault("correction", STALE_CORRECTION)
    return merged
