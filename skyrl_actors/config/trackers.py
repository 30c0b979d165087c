"""Experiment trackers, in addition to the files that every run writes."""

from typing import Annotated, Literal

from pydantic import Field

from skyrl_actors.config.frozen import FrozenConfig


class WandbTracker(FrozenConfig):
    """Weights & Biases. The key comes from `wandb login` or WANDB_API_KEY.

    WANDB_ENTITY names a user or a team.
    """

    type: Literal["wandb"] = "wandb"
    project: str = Field(default="skyrl-actors", description="project of the run")
    mode: Literal["online", "offline"] = Field(
        default="online",
        description="offline: write files to the run's folder, which `wandb sync` uploads later",
    )


class MlflowTracker(FrozenConfig):
    """MLflow, with a tracking server or a local store."""

    type: Literal["mlflow"] = "mlflow"
    uri: str = Field(
        description="address of the server (http://host:5000) or of the store (sqlite:///path)"
    )
    experiment: str = Field(default="skyrl-actors", description="experiment of the run")


Tracker = Annotated[WandbTracker | MlflowTracker, Field(discriminator="type")]
