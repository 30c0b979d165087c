"""Values of a job's keys for real models, where the file sets none (pure).

The defaults of the keys themselves fit the tiny model. Rates are those that SkyRL, verl and TRL
use: about ten times larger for adapters than for full fine-tunes.
"""

from typing import Any

from skyrl_actors.sizing.candidates import Keys

MAX_TOKENS = 1024  # of an answer
RATES = {  # by type of job: of a full fine-tune, of adapters
    "sft": (1e-5, 1e-4),
    "dpo": (5e-7, 5e-6),
    "reward_model": (1e-5, 1e-4),
}
RL_RATES = (1e-6, 1e-5)
CRITIC_RATES = (5e-6, 5e-5)


def for_real_model(job: Keys, is_rl: bool, uses_critic: bool, context_tokens: int) -> Keys:
    """Return the keys of a job with values for those that depend on the model's size."""
    adapters = job.get("lora_rank") is not None
    rates = RATES.get(str(job.get("type")), RL_RATES)
    found: dict[str, Any] = {"learning_rate": rates[adapters]}
    if is_rl:
        found["max_tokens"] = min(MAX_TOKENS, context_tokens // 2)
        if uses_critic:
            found["critic_lr"] = CRITIC_RATES[adapters]
    return found | job
