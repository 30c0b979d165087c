"""Training programs that learn from given texts: supervised fine-tuning, preferences, reward models."""

from typing import Literal

from pydantic import Field

from skyrl_actors.config.environments import DatasetConfig
from skyrl_actors.config.optimizer import AdamFields


class Supervised(AdamFields):
    """What learning from given texts has in common."""

    data: DatasetConfig
    eval_data: DatasetConfig | None = Field(
        default=None, description="null: the last eval_rows of data, which are then not trained on"
    )
    eval_rows: int = Field(default=100, ge=1, description="of data, where eval_data is null")
    eval_every: int = Field(default=20, ge=1, description="steps")
    seed: int = Field(default=0, ge=0)
    epochs: int = Field(default=1, ge=1)
    batch_rows: int = Field(default=32, ge=1)
    max_steps: int | None = Field(default=None, ge=1)
    max_row_tokens: int | None = Field(default=None, ge=2, description="null = what the model takes")
    long_rows: Literal["drop", "refuse"] = Field(
        default="drop", description="rows beyond the limit are counted and left out, or end the run"
    )
    lora_rank: int | None = Field(default=None, ge=1, description="adapter rank; null = full fine-tune")
    learning_rate: float = Field(default=2e-4, gt=0)
    warmup_steps: int = Field(default=0, ge=0, description="the rate rises linearly in so many steps, then falls linearly")


class SftConfig(Supervised):
    """Cross-entropy on answers, the mean over a batch's answer tokens.

    Rows hold `messages` (learned are the assistant's turns), or a prompt (text or messages) and a completion.
    """

    type: Literal["sft"] = "sft"
    messages_column: str | None = Field(default=None, description="set: chats; null: prompt_column and completion_column")
    prompt_column: str = "prompt"
    completion_column: str = "completion"


class Preferences(Supervised):
    """Rows hold a prompt and two answers, of which one was preferred."""

    prompt_column: str = "prompt"
    chosen_column: str = "chosen"
    rejected_column: str = "rejected"


class DpoConfig(Preferences):
    """Direct preference optimization (Rafailov et al., 2023, eq. 7), with the base model as reference."""

    type: Literal["dpo"] = "dpo"
    beta: float = Field(default=0.1, gt=0)
    learning_rate: float = Field(default=5e-5, gt=0)


class RewardModelConfig(Preferences):
    """A reward model with the loss of Bradley and Terry (Ouyang et al., 2022, eq. 1): its value at an answer's last token."""

    type: Literal["reward_model"] = "reward_model"
    learning_rate: float = Field(default=1e-4, gt=0)
