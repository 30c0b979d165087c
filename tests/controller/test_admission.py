"""Checks before anything runs: checkpoints of another kind, unsuitable base models, optimizers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_actors.api import translate, wire
from skyrl_actors.backends.backend import Capabilities
from skyrl_actors.backends.base_models import check_base
from skyrl_actors.config.cluster import ClusterConfig, EngineConfig, LoraConfig
from skyrl_actors.config.groups import GroupConfig
from skyrl_actors.config.strategies import Fsdp2Strategy, JaxStrategy
from skyrl_actors.controller.verbs.create_model import check_fits, check_spec, settled
from skyrl_actors.messages.errors import ConfigError, InvalidRequest
from skyrl_actors.messages.model import LoraSpec, ModelSpec

LORA = ModelSpec(model_id="m", base_model="tiny", lora=LoraSpec(rank=8))
FULL = ModelSpec(model_id="m", base_model="tiny")
CRITIC = ModelSpec(model_id="c", base_model="tiny", role="critic", lora=LoraSpec(rank=8))


@pytest.mark.parametrize(
    ("spec", "saved", "message"),
    [
        (
            LORA,
            replace(LORA, base_model="other"),
            "belongs to base model 'other'; this service has 'tiny'",
        ),
        (LORA, replace(LORA, lora=LoraSpec(rank=4)), "rank is 4 there and 8 here"),
        (
            LORA,
            replace(LORA, lora=LoraSpec(rank=8, alpha=16.0)),
            "alpha is 16.0 there and 32.0 here",
        ),
        (
            LORA,
            replace(LORA, lora=LoraSpec(rank=8, train_mlp=False)),
            "train_mlp is False there and True here",
        ),
        (FULL, LORA, "is a LoRA of rank 8, this model is a full fine-tune"),
        (
            LORA,
            replace(LORA, optimizer="muon"),
            "has the state of optimizer muon, this model uses adamw; load its weights alone",
        ),
        (
            CRITIC,
            LORA,
            "has a policy's optimizer state, this model is a critic; load its weights alone",
        ),
        (LORA, CRITIC, "is a critic; a policy cannot be made of it"),
        (
            FULL,
            replace(FULL, train_tower=True),
            "has train_tower=true, and this service sets policy.train_tower=false, .* load its",
        ),
    ],
)
def test_loading_a_checkpoint_of_another_kind_is_refused(
    spec: ModelSpec, saved: ModelSpec, message: str
):
    with pytest.raises(InvalidRequest, match=message):
        check_fits(spec, saved, "tinker://s/weights/c", True)


@pytest.mark.parametrize(
    ("spec", "saved"),
    [
        (LORA, LORA),
        (FULL, FULL),
        (CRITIC, LORA),
        (CRITIC, replace(LORA, lora=LoraSpec(rank=8, train_unembed=False))),
    ],
)
def test_loading_a_checkpoint_of_the_same_kind_is_accepted(spec: ModelSpec, saved: ModelSpec):
    check_fits(spec, saved, "tinker://s/weights/c", spec.role == saved.role)


def test_a_base_model_that_does_not_match_the_config_is_refused(random_base: Path, tmp_path: Path):
    def config(size: int) -> ClusterConfig:
        group = GroupConfig(num_ranks=size, sequence_parallel=size)
        return ClusterConfig(policy=group, critic=None, engine=EngineConfig(num_engines=size))

    check_base(random_base, config(2))
    with pytest.raises(
        ConfigError, match=r"policy\.sequence_parallel 3 does not divide the 4 attention heads"
    ):
        check_base(random_base, config(3))
    small = config(2).model_copy(
        update={"engine": EngineConfig(num_engines=2, kv_cache_bytes=2**20)}
    )
    with pytest.raises(
        ConfigError,
        match=r"kv_cache_bytes 1048576 holds 256 tokens of .*"
        r"max_model_len is 512; raise the one to 2097152",
    ):
        check_base(random_base, small)
    shape = json.loads((random_base / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**shape, "vocab_size": 256}))
    (tmp_path / "tokenizer.json").write_bytes((random_base / "tokenizer.json").read_bytes())
    with pytest.raises(
        ConfigError,
        match=r"tokenizer has \d+ tokens and its model 256; "
        r"this tokenizer belongs to another model",
    ):
        check_base(tmp_path, config(1))


def test_engines_with_quantized_weights_take_adapters_alone(random_base: Path, tmp_path: Path):
    shape = json.loads((random_base / "config.json").read_text())

    def base(**quantization: Any) -> Path:
        content = {**shape, "quantization_config": quantization}
        (tmp_path / "config.json").write_text(json.dumps(content))
        return tmp_path

    group = GroupConfig(num_ranks=1)
    config = ClusterConfig(policy=group, critic=None, engine=EngineConfig(num_engines=1))
    with pytest.raises(ConfigError, match=r"engines keep its mxfp4 weights.*max_full_models=0"):
        check_base(base(quant_method="mxfp4"), config)
    adapters = config.model_copy(update={"lora": LoraConfig(max_full_models=0)})
    check_base(base(quant_method="mxfp4"), adapters)
    check_base(base(quant_method="fp8", weight_block_size=[128, 128]), adapters)
    with pytest.raises(ConfigError, match=r"quantized with 'awq', and trainers read mxfp4"):
        check_base(base(quant_method="awq"), adapters)


def test_muon_is_refused_for_sharded_full_fine_tunes():
    from skyrl_actors.config.strategies import Fsdp2Strategy

    able = Capabilities(
        base_model="tiny",
        base_folder="",
        vocab_size=320,
        max_context_tokens=512,
        max_sample_tokens=512,
        roles=("policy",),
    )
    config = ClusterConfig(policy=GroupConfig(full_strategy=Fsdp2Strategy()), critic=None)
    check_spec(replace(LORA, optimizer="muon"), config, able)
    check_spec(replace(FULL, optimizer="muon"), ClusterConfig(critic=None), able)
    with pytest.raises(
        InvalidRequest,
        match=r"optimizer muon is for weights that are held whole; "
        r"this service shards full fine-tunes \(fsdp2\)",
    ):
        check_spec(replace(FULL, optimizer="muon"), config, able)


HEADLESS = Capabilities(
    base_model="tiny",
    base_folder="",
    vocab_size=320,
    max_context_tokens=512,
    max_sample_tokens=512,
    roles=("policy", "critic"),
    adapts_head=False,
)


def test_creating_an_adapter_on_an_output_layer_that_engines_cannot_adapt_is_refused():
    message = (
        r"train_unembed true: vLLM takes no adapter on the output layer of tiny, "
        r".* set train_unembed=False"
    )
    with pytest.raises(InvalidRequest, match=message):
        check_spec(LORA, ClusterConfig(), HEADLESS)
    without = replace(LORA, lora=LoraSpec(rank=8, train_unembed=False))
    for spec in (without, FULL, replace(LORA, role="critic")):  # the last is not sampled
        check_spec(spec, ClusterConfig(), HEADLESS)
    check_spec(LORA, ClusterConfig(), replace(HEADLESS, adapts_head=True))


@pytest.mark.parametrize("adapts_head", [True, False])
def test_an_adapter_covers_the_output_layer_by_default_if_it_can_be_sampled(adapts_head: bool):
    able = replace(HEADLESS, adapts_head=adapts_head)
    body = wire.CreateModel.model_validate(
        {"session_id": "s", "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 8}}
    )
    config = ClusterConfig()
    spec = settled(translate.create_model(body, 32.0).spec, able, config)
    assert spec.lora == LoraSpec(rank=8, train_unembed=adapts_head)
    check_spec(spec, ClusterConfig(), able)
    open_critic = replace(LORA, role="critic", lora=LoraSpec(rank=8, train_unembed=None))
    assert settled(open_critic, able, config).lora == LoraSpec(rank=8)
    assert settled(LORA, able, config) == LORA and settled(FULL, able, config) == FULL


def test_full_fine_tunes_train_the_tower_if_the_service_does():
    trains = ClusterConfig(policy=GroupConfig(train_tower=True))
    critic = replace(FULL, role="critic")
    assert settled(FULL, HEADLESS, trains) == replace(FULL, train_tower=True)
    assert settled(LORA, HEADLESS, trains) == LORA and settled(critic, HEADLESS, trains) == critic
    past = replace(FULL, train_tower=True)
    assert settled(past, HEADLESS, ClusterConfig()) == FULL
    assert settled(past, HEADLESS, ClusterConfig(), forks=True) == past


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lora": LoraConfig(max_full_models=0)}, "policy.train_tower applies to full fine-tunes"),
        (
            {"policy": GroupConfig(train_tower=True, full_strategy=Fsdp2Strategy())},
            "strategy is fsdp2; set policy.full_strategy.type=replica",
        ),
        (
            {"policy": GroupConfig(train_tower=True, strategy=JaxStrategy())},
            "strategy is jax; set policy.full_strategy.type=replica",
        ),
    ],
)
def test_a_tower_that_cannot_be_trained_is_refused(changed: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        ClusterConfig(**{"policy": GroupConfig(train_tower=True)} | changed)


def test_a_base_without_a_tower_has_none_to_train(random_base: Path):
    with pytest.raises(ConfigError, match=r"policy\.train_tower=true, but .* has no vision tower"):
        check_base(random_base, ClusterConfig(policy=GroupConfig(train_tower=True)))


def test_adapters_get_the_layout_of_experts_that_the_service_computes():
    found = settled(LORA, HEADLESS, ClusterConfig(lora=LoraConfig(expert_layout="per_expert")))
    assert found.lora == LoraSpec(rank=8, expert_layout="per_expert")
    other = replace(LORA, lora=LoraSpec(rank=8))
    with pytest.raises(InvalidRequest, match="expert_layout is shared_outer there and per_expert"):
        check_fits(found, other, "tinker://m/weights/1", with_optimizer=False)
