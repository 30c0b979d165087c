"""Values of a job's keys for real models, where the file sets none (pure).

The defaults of the keys themselves fit the tiny model. Rates are those that SkyRL, verl and TRL
use: about ten times larger for adapters than for full fine-tunes. These three also train once on
each answer, and sample several hundred answers or more in an iteration.
"""

from typing import Any

from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.sizing.candidates import Keys

MAX_TOKENS = 1024  # of an answer
RATES = {  # by type of job: of a full fine-tune, of adapters
    "sft": (1e-5, 1e-4),
    "dpo": (5e-7, 5e-6),
    "reward_model": (1e-5, 1e-4),
}
RL_RATES = (1e-6, 1e-5)
CRITIC_RATES = (5e-6, 5e-5)
ANSWERS = {"gpu": 1024, "cpu": 64}  # of an iteration
ANSWERS_TO_A_PROMPT = 8  # with a critic, which needs no comparisons between them, half of it


def for_real_model(job: Keys, is_rl: bool, uses_critic: bool, cluster: ClusterConfig) -> Keys:
    """Return the keys of a job with values for those that depend on the model's size.

    A key in `job` keeps its value, and the others follow it: the number of prompts depends on
    `samples_per_prompt`.
    """
    adapters = job.get("lora_rank") is not None
    rates = RATES.get(str(job.get("type")), RL_RATES)
    found: dict[str, Any] = {"learning_rate": rates[adapters]}
    if is_rl:
        found["max_tokens"] = min(MAX_TOKENS, cluster.engine.max_model_len // 2)
        if uses_critic:
            found["critic_lr"] = CRITIC_RATES[adapters]
        found |= _batch(job, uses_critic, cluster)
    return found | job


def _batch(job: Keys, uses_critic: bool, cluster: ClusterConfig) -> Keys:
    usual = ANSWERS_TO_A_PROMPT // 2 if uses_critic else ANSWERS_TO_A_PROMPT
    # Two are compared at least. A config in which even they do not fit is refused by name.
    fitting = max(2, min(usual, cluster.samples_in_flight))
    samples = job.get("samples_per_prompt", fitting)
    found: Keys = {"samples_per_prompt": samples, "epochs": 1}
    if isinstance(samples, int) and samples > 0:  # otherwise the config refuses it by name
        found["prompts"] = max(1, ANSWERS[cluster.placement.device] // samples)
    return found
