"""The order of sampling and training in a job."""

from typing import Annotated, Literal

from pydantic import Field

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
    slice_tokens: int | None = Field(
        default=None,
        ge=1,
        description="null: an episode is sampled with the weights that it started with; a number: "
        "answers are sampled in slices of so many tokens, each with the newest weights (partial "
        "rollouts), and the KV cache of the earlier tokens is computed again with them",
    )


Schedule = Annotated[OnPolicy | OneStepOff | Asynchronous, Field(discriminator="type")]
