"""Optimizer settings that no step can use are refused with what is allowed."""

import pytest

from skyrl_actors.controller.verbs.optim_step import check_adam
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.model import AdamParams


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"learning_rate": -1.0}, "learning_rate is -1.0: out of range; use a number from 0"),
        ({"beta2": 1.0}, "beta2 is 1.0: out of range; use a number from 0 to below 1"),
        ({"eps": 0.0}, "eps is 0.0: out of range; use a number from 1e-38"),  # 0/0 of a new LoRA
        ({"eps": 1e-46}, "eps is 1e-46"),  # 0 in float32
        ({"grad_clip_norm": float("nan")}, "grad_clip_norm is nan"),
    ],
)
def test_settings_out_of_range_are_refused(given: dict[str, float], said: str):
    with pytest.raises(InvalidRequest, match=said):
        check_adam(AdamParams(**given))


def test_usual_and_small_settings_pass():
    check_adam(AdamParams())
    check_adam(AdamParams(learning_rate=0.0, beta1=0.0, beta2=0.0, eps=1e-30))
