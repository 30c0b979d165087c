"""Which files of a folder are a model's weights."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from skyrl_actors.workers.tensor_files import TensorFiles


def write(folder: Path, name: str, *tensors: str) -> None:
    save_file({tensor: torch.zeros(2) for tensor in tensors}, folder / name)


def test_weights_in_a_second_format_are_not_counted_twice(tmp_path: Path):
    write(tmp_path, "consolidated.safetensors", "layers.0.attention.wq.weight")
    write(tmp_path, "model-00001-of-00002.safetensors", "model.embed_tokens.weight")
    write(tmp_path, "model-00002-of-00002.safetensors", "lm_head.weight")
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    with TensorFiles(tmp_path) as files:
        assert sorted(files.shapes) == sorted(names)
    write(tmp_path, "model-extra.safetensors", "other")
    index = {name: f"model-0000{i}-of-00002.safetensors" for i, name in enumerate(names, 1)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with TensorFiles(tmp_path) as files:
        assert sorted(files.shapes) == sorted(names)


def test_files_with_other_names_are_read_if_there_are_no_others(tmp_path: Path):
    write(tmp_path, "weights.safetensors", "lm_head.weight")
    with TensorFiles(tmp_path) as files:
        assert list(files.shapes) == ["lm_head.weight"]
