"""Where prompts and rewards come from."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from skyrl_actors.config.base import FrozenConfig


class DatasetConfig(FrozenConfig):
    """Rows of a JSONL or Parquet file, or of a Hugging Face dataset (a folder made by `save_to_disk`, or a name)."""

    path: str = Field(
        description="file.jsonl or file.parquet, here or by URL (s3://, gs://); a folder; or a name on the Hugging Face hub"
    )
    split: str = Field(default="train", description="of a Hugging Face dataset")
    limit: int | None = Field(default=None, ge=1, description="only the first so many rows")


class EnvLimits(FrozenConfig):
    """What every environment has."""

    timeout_s: float = Field(
        default=60.0, gt=0, description="for each reset, step or reward; an episode that takes longer is dropped"
    )
    max_turns: int = Field(default=1, ge=1)
    max_prompt_tokens: int | None = Field(default=None, ge=1, description="null = what the engines take, less max_tokens")
    long_prompts: Literal["drop", "refuse"] = Field(
        default="drop", description="prompts beyond the limit are counted and left out, or end the run"
    )
    concurrency: int = Field(
        default=64, ge=1, description="resets, steps and rewards under way at once; the clock of timeout_s runs for these"
    )
    max_failed_share: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="of an iteration's episodes: when more fail (an error, a timeout, a reward that is no number), the run ends",
    )


class OneTurn(EnvLimits):
    @model_validator(mode="after")
    def _one(self) -> "OneTurn":
        if self.max_turns != 1:
            raise ValueError(f"max_turns {self.max_turns}: an episode of this environment is one answer; set 1, or leave it out")
        return self


class ReverseEnv(OneTurn):
    """Write a short word backwards. Reward 1 for the exact answer, else 0. Evaluation words are never trained on."""

    type: Literal["reverse"] = "reverse"
    min_letters: int = Field(default=3, ge=1)
    max_letters: int = Field(default=5, le=32)
    eval_prompts: int = Field(default=200, ge=1)

    @model_validator(mode="after")
    def _range(self) -> "ReverseEnv":
        if self.min_letters > self.max_letters:
            raise ValueError(f"min_letters {self.min_letters} is above max_letters {self.max_letters}")
        return self


class RewardEnv(OneTurn):
    """A dataset of prompts and a function `(prompt, completion, row) -> float`, plain or async.

    The prompt column holds a text or a list of {role, content}; `completion` is the answer's text.
    """

    type: Literal["reward"] = "reward"
    data: DatasetConfig
    eval_data: DatasetConfig | None = Field(
        default=None, description="null: the last eval_prompts rows of data, which are then not trained on"
    )
    eval_prompts: int = Field(default=200, ge=1, description="of data, where eval_data is null")
    prompt_column: str = "prompt"
    answer_column: str | None = Field(default=None, description="shown beside samples")
    reward: str = Field(pattern=r"^[^:]+:[A-Za-z_][A-Za-z0-9_]*$", description="module:function or path/to/file.py:function")


class GymEnv(EnvLimits):
    """An environment of skyrl-gym by its id, unchanged: rows of the dataset become its `extras`."""

    type: Literal["skyrl_gym"] = "skyrl_gym"
    id: str = Field(description="e.g. gsm8k; or module:Class of a BaseTextEnv")
    config: dict[str, Any] = Field(default_factory=dict[str, Any], description="its env_config")
    data: DatasetConfig
    eval_data: DatasetConfig | None = None
    eval_prompts: int = Field(default=200, ge=1, description="of data, where eval_data is null")
    prompt_column: str = "prompt"
    max_turns: int = Field(default=8, ge=1)


class CustomEnv(EnvLimits):
    """Your own: a function `(seed, **options)` that gives a task set (`skyrl_actors.jobs.environment.TaskSet`)."""

    type: Literal["custom"] = "custom"
    tasks: str = Field(pattern=r"^[^:]+:[A-Za-z_][A-Za-z0-9_]*$", description="module:function or path/to/file.py:function")
    options: dict[str, Any] = Field(default_factory=dict[str, Any])


Environment = Annotated[ReverseEnv | RewardEnv | GymEnv | CustomEnv, Field(discriminator="type")]
