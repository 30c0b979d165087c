"""Engines update from the same files of a base model that trainers and vLLM read."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from skyrl_actors.backends.weight_files import check_weights
from skyrl_actors.engines.vllm_engine import VllmEngine
from skyrl_actors.engines.weight_parts import base_parts
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.storage.model_files import weight_files
from tests.engines.test_resident_adapters import Vllm, engine_with

ONE, TWO = {"a": np.ones(2, np.float32)}, {"b": np.arange(3)}
INDEX = {"weight_map": {"a": "shard-1.safetensors", "b": "shard-2.safetensors"}}


def put(folder: Path, files: dict[str, Any]) -> list[str]:
    for name, content in files.items():
        if name.endswith(".json"):
            (folder / name).write_text(json.dumps(content))
        else:
            save_file(content, folder / name)
    return [Path(part.path).name for part in parts_of(folder)]


def parts_of(folder: Path) -> Any:
    spec: Any = SimpleNamespace(base_folder=str(folder))
    return base_parts(spec)


@pytest.mark.parametrize(
    ("files", "used"),
    [
        ({"weights.safetensors": ONE | TWO}, ["weights.safetensors"]),
        (
            {
                "shard-1.safetensors": ONE,
                "shard-2.safetensors": TWO,
                "model.safetensors": ONE | TWO,  # not in the index
                "model.safetensors.index.json": INDEX,
            },
            ["shard-1.safetensors", "shard-2.safetensors"],
        ),
        (
            {"model.safetensors": ONE | TWO, "consolidated.safetensors": {"w": np.ones(1)}},
            ["model.safetensors"],
        ),
    ],
    ids=["another name", "index", "the same once more"],
)
def test_all_readers_take_the_same_files(files: dict[str, Any], used: list[str], tmp_path: Path):
    assert put(tmp_path, files) == used
    check_weights(tmp_path)
    assert [file.name for file in weight_files(tmp_path)] == used
    entries = [entry for part in parts_of(tmp_path) for entry in part.tensors]
    assert {entry.name: entry.dtype for entry in entries} == {"a": "float32", "b": "int64"}
    assert len(entries) == 2


async def test_an_engine_that_could_not_return_to_its_base_is_refused(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("skyrl_actors.engines.vllm_engine.base_parts", lambda _: ())
    engine: VllmEngine = engine_with(Vllm(2))
    engine._prompts = SimpleNamespace(placeholder=None)  # type: ignore[assignment]
    config = SimpleNamespace(architecture="Tiny", get_vocab_size=lambda: 256)
    engine._llm.model_config = config  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="has no safetensors files"):
        await engine._prove()
