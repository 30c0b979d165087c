"""`plan` of a service with several base models."""

from pathlib import Path

import pytest

from skyrl_actors.commands import plan
from skyrl_actors.messages.errors import ConfigError

CATALOGUE = """
base_models:
  small: {base_model: {type: pretrained, name: small, path: configs/shapes/qwen3-1.7b}}
  large: {base_model: {type: pretrained, name: large, path: configs/shapes/qwen3-8b}}
placement: {device: gpu}
policy: {num_ranks: 8, dtype: bfloat16, activations: recompute}
critic: null
engine: {num_engines: 8, dtype: bfloat16, kv_cache_bytes: 17179869184, max_model_len: 8192}
lora: {max_full_models: 0}
"""


def test_the_plan_of_several_base_models_has_the_memory_of_each_and_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = tmp_path / "catalogue.yaml"
    config.write_text(CATALOGUE)
    plan.run(str(config), (), gpus="8xH100")
    printed = capsys.readouterr().out
    assert "skyrl-actors:small/policy[0] 0.15" in printed
    assert "small\nmemory of a policy & engine device" in printed.replace("\n\n", "\n")
    assert "base models: on the devices as many as fit in" in printed and "2 loaded" in printed
    with pytest.raises(ConfigError, match="--model is for one base model"):
        plan.run(str(config), (), gpus="8xH100", model=Path("configs/shapes/qwen3-8b"))
    with pytest.raises(ConfigError, match="the memory plan does not fit"):
        plan.run(
            str(config), ("base_models.large.engine.kv_cache_bytes=68719476736",), gpus="8xH100"
        )
