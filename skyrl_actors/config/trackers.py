"""Experiment trackers, in addition to the files that every run writes."""

from typing import Annotated, Literal

from pydantic import Field

from skyrl_actors.config.frozen import FrozenConfig


class ProjectTracker(FrozenConfig):
    """The key that all trackers share."""

    project: str = Field(
        default="skyrl-actors", description="project of W&B, or experiment of MLflow"
    )


class WandbTracker(ProjectTracker):
    """Weights & Biases. The key comes from `wandb login` or WANDB_API_KEY.

    WANDB_ENTITY names a user or a team. WANDB_MODE=offline writes files to the run's folder, which
    `wandb sync` uploads later.
    """

    type: Literal["wandb"] = "wandb"


class MlflowTracker(ProjectTracker):
    """MLflow, with a tracking server or a local store."""

    type: Literal["mlflow"] = "mlflow"
    uri: str = Field(
        description="address of the server (http://host:5000) or of the store (sqlite:///path)"
    )


Tracker = Annotated[WandbTracker | MlflowTracker, Field(discriminator="type")]
