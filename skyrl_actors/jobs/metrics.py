"""The metrics that a run records, with definition, unit and reduction.

Other names cannot be recorded.
`python -m skyrl_actors.jobs.metrics > docs/reference/job_metrics.md` generates the page.
"""

from dataclasses import dataclass

TOKENS, EPISODES, MINIBATCHES, ONCE = (
    "mean over sampled tokens",
    "mean over episodes",
    "mean over minibatches",
    "once per step",
)


@dataclass(frozen=True, slots=True)
class Metric:
    """The definition of one metric."""

    name: str
    definition: str
    unit: str
    reduction: str


_ALL = (
    Metric(
        "eval/accuracy",
        "reward of greedy answers to held-out prompts; for tasks with one right answer, "
        "the share of exact matches",
        "reward",
        "mean over prompts",
    ),
    Metric(
        "eval/nll",
        "−log p of the tokens of held-out answers",
        "nats per token",
        "mean over answer tokens",
    ),
    Metric("eval/loss", "the job's loss on held-out pairs", "nats", "mean over pairs"),
    Metric(
        "eval/pair_accuracy",
        "held-out pairs in which the chosen answer has the larger margin; ties count half",
        "share",
        "mean over pairs",
    ),
    Metric(
        "eval/margin",
        "margin of held-out pairs, defined as for `margin`",
        "nats (dpo), reward (reward_model)",
        "mean over pairs",
    ),
    Metric(
        "reward",
        "reward of an episode, with all turns and the overlong penalty, "
        "without the KL penalty; over all sampled episodes",
        "reward",
        EPISODES,
    ),
    Metric(
        "kl",
        "k3 estimate of KL(policy ‖ reference), before this step's updates",
        "nats per token",
        TOKENS,
    ),
    Metric("kl_coef", "coefficient of the divergence in this step", "1", ONCE),
    Metric(
        "entropy",
        "entropy of the policy's distribution during updates",
        "nats per token",
        "mean over counted tokens",
    ),
    Metric(
        "explained_variance",
        "1 − Var(return − value) / Var(return)",
        "1",
        "over sampled tokens",
    ),
    Metric(
        "logprob_mismatch",
        "|log p of the engine − log p of the trainer|, for the same weights and tokens, "
        "both at temperature 1; left out if all samples are from older weights",
        "nats per token",
        "mean over tokens sampled with the weights that learn",
    ),
    Metric(
        "logprob_mismatch_max",
        "largest value of `logprob_mismatch`",
        "nats per token",
        "maximum over the same tokens",
    ),
    Metric(
        "staleness",
        "iterations between the weights that sampled a token and the weights that train on it; "
        "0 on policy",
        "iterations",
        TOKENS,
    ),
    Metric(
        "staleness_max", "largest value of `staleness`", "iterations", "maximum over sampled tokens"
    ),
    Metric(
        "policy_drift",
        "|log p of the engine when it sampled − log p of the trainer now| "
        "of tokens sampled with older weights, both at temperature 1",
        "nats per token",
        "mean over those tokens",
    ),
    Metric("answer_tokens", "tokens of an episode that the model sampled", "tokens", EPISODES),
    Metric(
        "cut_share",
        "episodes whose last answer ended at max_tokens or at the end of the context",
        "share",
        EPISODES,
    ),
    Metric("turns", "number of answers in an episode", "1", EPISODES),
    Metric(
        "episodes_failed",
        "dropped episodes: the environment raised an error, timed out or returned a reward "
        "that is not finite",
        "episodes",
        "sum",
    ),
    Metric(
        "prompts_too_long",
        "prompts beyond env.max_prompt_tokens, which are left out",
        "prompts",
        "sum",
    ),
    Metric(
        "prompts_without_spread",
        "prompts that the filter left out because all their answers had the same reward",
        "prompts",
        "sum",
    ),
    Metric("batches_drawn", "batches of prompts sampled for this iteration", "batches", "sum"),
    Metric(
        "sampled_tokens",
        "sampled tokens, including those of prompts that were left out",
        "tokens",
        "sum",
    ),
    Metric(
        "policy_loss",
        "loss of the policy, reduced as `reduction` defines, with divergence and entropy terms",
        "1",
        MINIBATCHES,
    ),
    Metric(
        "clip_fraction",
        "trained tokens whose ratio was clipped",
        "share",
        "over the tokens of all epochs",
    ),
    Metric(
        "policy_grad_norm", "L2 norm of the policy's gradient before clipping", "1", MINIBATCHES
    ),
    Metric("value_loss", "(value − return)²", "reward²", "mean over the tokens of all epochs"),
    Metric(
        "value_clip_fraction",
        "tokens whose value was clipped",
        "share",
        "over the tokens of all epochs",
    ),
    Metric(
        "critic_grad_norm", "L2 norm of the critic's gradient before clipping", "1", MINIBATCHES
    ),
    Metric(
        "nll",
        "−log p of the answer tokens of a batch, before its step",
        "nats per token",
        "mean over answer tokens",
    ),
    Metric("loss", "the job's loss on a batch, before its step", "nats", "mean over pairs"),
    Metric(
        "pair_accuracy",
        "pairs in which the chosen answer has the larger margin, before the step; ties count half",
        "share",
        "mean over pairs",
    ),
    Metric(
        "margin",
        "dpo: β·(gain of chosen − gain of rejected), where gain is log p − log p of the "
        "reference; reward_model: V(chosen) − V(rejected)",
        "nats (dpo), reward (reward_model)",
        "mean over pairs",
    ),
    Metric("learning_rate", "learning rate of this step", "1", ONCE),
    Metric(
        "sample_tokens_per_s",
        "`sampled_tokens` divided by `seconds/sample`; if sampling runs during training, "
        "divided by the seconds since the last batch",
        "tokens/s",
        ONCE,
    ),
    Metric(
        "train_tokens_per_s",
        "prompt and answer tokens through forward and backward passes, of each role and epoch, "
        "divided by `seconds/update`",
        "tokens/s",
        ONCE,
    ),
    Metric(
        "seconds/sample",
        "sampling, environments and waking the engines; if sampling runs during training, "
        "the wait for samples",
        "s",
        ONCE,
    ),
    Metric(
        "seconds/values_and_reference",
        "computation of logprobs, values and logprobs of the reference",
        "s",
        ONCE,
    ),
    Metric("seconds/advantages", "computation of rewards, advantages and returns", "s", ONCE),
    Metric("seconds/update", "all minibatches and optimizer steps of all epochs", "s", ONCE),
    Metric(
        "seconds/transfer",
        "publication of the new weights as a version; engines load it when they sample",
        "s",
        ONCE,
    ),
    Metric("seconds/iteration", "the whole step without evaluation", "s", ONCE),
)
REGISTRY = {metric.name: metric for metric in _ALL}


def checked(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics unchanged.

    Raises:
        KeyError: A name has no definition.
    """
    if unknown := sorted(metrics.keys() - REGISTRY.keys()):
        raise KeyError(f"metrics without a definition in jobs/metrics.py: {', '.join(unknown)}")
    return metrics


HEAD = """# Metrics of a job

A run writes one row for each step to `metrics.jsonl` and TensorBoard.
`eval/…` is measured every `eval_every` steps.
`python -m skyrl_actors.jobs.metrics` generates this page.
"""


def markdown() -> str:
    """Return the reference page."""
    rows = "".join(
        f"| `{m.name}` | {_cell(m.definition)} | {m.unit} | {m.reduction} |\n" for m in _ALL
    )
    return f"{HEAD}\n| metric | definition | unit | reduction |\n|---|---|---|---|\n{rows}"


def _cell(text: str) -> str:
    """Escape |, which separates the columns of a Markdown table."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(markdown(), end="")
