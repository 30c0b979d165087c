"""The layers of a job's adapters."""

import pytest
from pydantic import ValidationError

from skyrl_actors.config.job import RlConfig
from skyrl_actors.config.supervised import RewardModelConfig, SftConfig
from skyrl_actors.jobs.adapters import adapter_of, untrained_adapter
from skyrl_actors.messages.model import LoraSpec


def test_an_adapter_has_the_layers_that_the_job_names():
    plain = RlConfig(type="grpo", lora_rank=8)
    assert adapter_of(plain, 16.0) == LoraSpec(rank=8, alpha=16.0, train_unembed=None)
    few = RlConfig(type="grpo", lora_rank=8, train_mlp=False, train_unembed=False)
    assert adapter_of(few, 32.0) == LoraSpec(rank=8, train_mlp=False, train_unembed=False)
    assert adapter_of(RlConfig(type="grpo"), 32.0) is None


@pytest.mark.parametrize(
    ("layers", "wanted"),
    [
        ({}, (True, False, False)),
        ({"train_attn": False}, (False, True, False)),
        ({"train_attn": False, "train_mlp": False, "train_unembed": True}, (False, False, True)),
    ],
)
def test_a_reference_has_an_adapter_on_layers_of_the_job(
    layers: dict[str, bool], wanted: tuple[bool, ...]
):
    spec = untrained_adapter(RlConfig.model_validate({"type": "grpo", "lora_rank": 8, **layers}))
    assert (spec.train_attn, spec.train_mlp, spec.train_unembed) == wanted and spec.rank == 1


@pytest.mark.parametrize("kind", [RlConfig, SftConfig, RewardModelConfig])
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train_mlp": False}, "train_mlp: layers of adapters, and lora_rank null"),
        ({"train_unembed": False}, "train_unembed: layers of adapters"),
        (
            {"lora_rank": 8, "train_attn": False, "train_mlp": False},
            "no layers are trained: set at least one of",
        ),
    ],
)
def test_layers_that_have_no_effect_are_refused(
    kind: type[RlConfig | SftConfig | RewardModelConfig], keys: dict[str, object], message: str
):
    data = {} if kind is RlConfig else {"data": {"path": "x"}}
    with pytest.raises(ValidationError, match=message):
        kind.model_validate({**data, **keys})


def test_a_reward_model_has_no_output_layer():
    keys = {"data": {"path": "x"}, "lora_rank": 8}
    for value in (True, False):
        with pytest.raises(ValidationError, match="train_unembed does nothing, because a reward"):
            RewardModelConfig.model_validate({**keys, "train_unembed": value})
    with pytest.raises(ValidationError, match="no layers are trained"):
        RewardModelConfig.model_validate({**keys, "train_attn": False, "train_mlp": False})
