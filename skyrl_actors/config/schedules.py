"""When a job samples and when it learns."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from skyrl_actors.config.base import FrozenConfig


class OnPolicy(FrozenConfig):
    """Sample, learn, sample: engines and trainers take turns, and every sample is of the weights that learn from it."""

    type: Literal["on_policy"] = "on_policy"


class OneStepOff(FrozenConfig):
    """While iteration k learns, the batch of k + 1 is sampled with the weights that k began with: one iteration old."""

    type: Literal["one_step_off"] = "one_step_off"


class Asynchronous(FrozenConfig):
    """Sampling never waits for learning: episodes begin as others end, as long as none can grow older than `max_staleness`."""

    type: Literal["asynchronous"] = "asynchronous"
    max_staleness: int = Field(
        default=2, ge=1, description="iterations between the weights that an episode began with and those that learn from it"
    )
    in_flight: Literal["finish", "update"] = Field(
        default="finish",
        description="finish: an episode keeps the weights that it began with. update: answers go on with the newest weights, from "
        "one slice to the next (partial rollouts); what they have is computed anew under them",
    )
    slice_tokens: int = Field(
        default=256, ge=1, description="of in_flight update: tokens sampled before the weights are looked at"
    )

    @model_validator(mode="after")
    def _used(self) -> "Asynchronous":
        if self.in_flight == "finish" and self.slice_tokens != Asynchronous.model_fields["slice_tokens"].default:
            raise ValueError("slice_tokens belongs to in_flight update")
        return self


Schedule = Annotated[OnPolicy | OneStepOff | Asynchronous, Field(discriminator="type")]
