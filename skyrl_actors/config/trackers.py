"""Trackers beside the files that every run writes."""

from typing import Annotated, Literal

from pydantic import Field

from skyrl_actors.config.base import FrozenConfig


class WandbTracker(FrozenConfig):
    """Weights & Biases; the key is that of `wandb login` or WANDB_API_KEY."""

    type: Literal["wandb"] = "wandb"
    project: str = "skyrl-actors"
    entity: str | None = Field(default=None, description="a user or team; none = wandb's own default")
    mode: Literal["online", "offline"] = Field(
        default="online", description="offline: files in the run's folder, for `wandb sync`"
    )


class MlflowTracker(FrozenConfig):
    """MLflow; the server's address or a local store."""

    type: Literal["mlflow"] = "mlflow"
    uri: str = Field(description="http://host:5000, or sqlite:///path")
    experiment: str = "skyrl-actors"


Tracker = Annotated[WandbTracker | MlflowTracker, Field(discriminator="type")]
