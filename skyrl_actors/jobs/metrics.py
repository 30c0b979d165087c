"""Every number that a run records: what it is, its unit, over what it is taken. A name that is not here can not be recorded.

`python -m skyrl_actors.jobs.metrics > docs/metrics.md` prints the table of the docs.
"""

from dataclasses import dataclass

TOKENS, EPISODES, MINIBATCHES, ONCE = "mean over sampled tokens", "mean over episodes", "mean over minibatches", "once a step"


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    definition: str
    unit: str
    reduction: str


_ALL = (
    Metric("eval/accuracy", "reward of greedy answers to held-out prompts; an exact match where the task is one", "reward", "mean over prompts"),
    Metric("eval/nll", "−log p of held-out answers' tokens", "nats a token", "mean over answer tokens"),
    Metric("eval/loss", "the job's loss on held-out pairs", "nats", "mean over pairs"),
    Metric("eval/pair_accuracy", "held-out pairs in which the chosen answer has the larger margin; even ones count half", "share", "mean over pairs"),
    Metric("eval/margin", "margin of held-out pairs, as in `margin`", "nats (dpo), reward (reward_model)", "mean over pairs"),
    Metric("reward", "reward of an episode, all turns and the overlong penalty included, without the KL penalty; of all that were drawn", "reward", EPISODES),
    Metric("kl", "k3 estimate of KL(policy ‖ reference), before this step's updates", "nats a token", TOKENS),
    Metric("kl_coef", "coefficient of the divergence in this step", "1", ONCE),
    Metric("entropy", "entropy of the policy's distribution during updates", "nats a token", "mean over counted tokens"),
    Metric("explained_variance", "1 − Var(return − value) / Var(return)", "1", "over sampled tokens"),
    Metric("logprob_mismatch", "|log p of the engine − log p of the trainer|, same weights, same tokens, both at temperature 1; left out where all samples are older",
           "nats a token", "mean over tokens sampled with the weights that learn"),
    Metric("logprob_mismatch_max", "the largest of these", "nats a token", "maximum over the same tokens"),
    Metric("staleness", "iterations between the weights that sampled a token and those that learn from it; 0 on policy", "iterations", TOKENS),
    Metric("staleness_max", "the largest of these", "iterations", "maximum over sampled tokens"),
    Metric("policy_drift", "|log p of the engine then − log p of the trainer now| of tokens sampled with older weights, both at temperature 1", "nats a token",
           "mean over those tokens"),
    Metric("answer_tokens", "tokens of an episode that the model sampled", "tokens", EPISODES),
    Metric("cut_share", "episodes whose last answer ended at max_tokens, or for want of context", "share", EPISODES),
    Metric("turns", "answers of an episode", "1", EPISODES),
    Metric("episodes_failed", "episodes dropped: the environment raised, hung, or gave no finite reward", "episodes", "sum"),
    Metric("prompts_too_long", "prompts left out by env.max_prompt_tokens", "prompts", "sum"),
    Metric("prompts_without_spread", "prompts left out by the filter: all their answers had one reward", "prompts", "sum"),
    Metric("batches_drawn", "batches of prompts sampled for this iteration", "batches", "sum"),
    Metric("sampled_tokens", "tokens sampled, those of prompts left out included", "tokens", "sum"),
    Metric("policy_loss", "the policy's loss as `reduction` takes its mean, with divergence and entropy terms", "1", MINIBATCHES),
    Metric("clip_fraction", "learned tokens whose ratio was clipped", "share", "over all epochs' tokens"),
    Metric("policy_grad_norm", "L2 norm of the policy's gradient before clipping", "1", MINIBATCHES),
    Metric("value_loss", "(value − return)²", "reward²", "mean over all epochs' tokens"),
    Metric("value_clip_fraction", "tokens whose value was clipped", "share", "over all epochs' tokens"),
    Metric("critic_grad_norm", "L2 norm of the critic's gradient before clipping", "1", MINIBATCHES),
    Metric("nll", "−log p of a batch's answer tokens, before its step", "nats a token", "mean over answer tokens"),
    Metric("loss", "the job's loss on a batch, before its step", "nats", "mean over pairs"),
    Metric("pair_accuracy", "pairs in which the chosen answer has the larger margin, before the step; even ones count half", "share", "mean over pairs"),
    Metric("margin", "dpo: β·(gain of chosen − gain of rejected) over the reference; reward_model: V(chosen) − V(rejected)",
           "nats (dpo), reward (reward_model)", "mean over pairs"),
    Metric("learning_rate", "of this step", "1", ONCE),
    Metric("sample_tokens_per_s", "sampled_tokens / seconds/sample; where sampling runs beside learning, / the seconds since the last batch", "tokens/s", ONCE),
    Metric("train_tokens_per_s", "prompt and answer tokens through forward and backward, each role and epoch, / seconds/update", "tokens/s", ONCE),
    Metric("seconds/sample", "sampling, environments and waking the engines; where sampling runs beside learning, waiting for it", "s", ONCE),
    Metric("seconds/values_and_reference", "logprobs, values and the reference's logprobs", "s", ONCE),
    Metric("seconds/advantages", "rewards, advantages, returns", "s", ONCE),
    Metric("seconds/update", "all minibatches and steps of all epochs", "s", ONCE),
    Metric("seconds/transfer", "freezing the new weights as a version; engines take it when they sample", "s", ONCE),
    Metric("seconds/iteration", "the whole step, evaluation aside", "s", ONCE),
)  # fmt: skip
REGISTRY = {metric.name: metric for metric in _ALL}


def checked(metrics: dict[str, float]) -> dict[str, float]:
    """Raises KeyError for a name that has no definition."""
    if unknown := sorted(metrics.keys() - REGISTRY.keys()):
        raise KeyError(f"metrics without a definition in jobs/metrics.py: {', '.join(unknown)}")
    return metrics


def markdown() -> str:
    rows = "".join(f"| `{m.name}` | {m.definition} | {m.unit} | {m.reduction} |\n" for m in _ALL)
    return f"# Metrics of a run\n\nIn `metrics.jsonl` and TensorBoard, one row a step; `eval/…` every `eval_every` steps.\n\n| metric | definition | unit | reduction |\n|---|---|---|---|\n{rows}"


if __name__ == "__main__":
    print(markdown(), end="")
