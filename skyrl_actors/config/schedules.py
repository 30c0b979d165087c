"""The order of sampling and training in a job."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from skyrl_actors.config.frozen import FrozenConfig


class OnPolicy(FrozenConfig):
    """Sampling and training alternate. Every sample comes from the weights that train on it."""

    type: Literal["on_policy"] = "on_policy"


class OneStepOff(FrozenConfig):
    """While iteration k trains, the batch of iteration k + 1 is sampled.

    These samples come from the weights at the start of iteration k, so they are one iteration old.
    """

    type: Literal["one_step_off"] = "one_step_off"


class Asynchronous(FrozenConfig):
    """Sampling does not wait for training.

    A new episode starts when another ends, unless it could become older than `max_staleness`.
    """

    type: Literal["asynchronous"] = "asynchronous"
    max_staleness: int = Field(
        default=2,
        ge=1,
        description="largest number of iterations between the weights that start an episode and "
        "the weights that train on it",
    )
    in_flight: Literal["finish", "update"] = Field(
        default="finish",
        description="finish: an episode is sampled with the weights that it started with; "
        "update: each slice of an answer is sampled with the newest weights (partial rollouts), "
        "and the KV cache of the earlier tokens is computed again with them",
    )
    slice_tokens: int = Field(
        default=256,
        ge=1,
        description="in_flight update: tokens sampled between two checks for newer weights",
    )

    @model_validator(mode="after")
    def _used(self) -> "Asynchronous":
        if (
            self.in_flight == "finish"
            and self.slice_tokens != Asynchronous.model_fields["slice_tokens"].default
        ):
            raise ValueError(
                "slice_tokens has an effect only with in_flight update; "
                "set in_flight to update, or leave out slice_tokens"
            )
        return self


Schedule = Annotated[OnPolicy | OneStepOff | Asynchronous, Field(discriminator="type")]
