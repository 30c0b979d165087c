"""Weights that are not there are found before any process starts."""

import json
from pathlib import Path

import pytest

from skyrl_actors.backends.base_models import base_model_folder
from skyrl_actors.config.base_models import PretrainedBase
from skyrl_actors.messages.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-1-of-2.safetensors").write_bytes(b"\0" * 10)
    (tmp_path / "model-2-of-2.safetensors").write_bytes(b"\0" * 10)
    names = {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return tmp_path


def found(folder: Path) -> Path:
    return base_model_folder(PretrainedBase(name="m", path=folder), lambda count: [])


def test_a_whole_model_is_accepted(folder: Path):
    assert found(folder) == folder


def test_weights_that_trainers_cannot_read_are_named(folder: Path):
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "model.safetensors").symlink_to(folder / "blobs")
    with pytest.raises(ConfigError, match="no weights there"):
        found(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\0")
    with pytest.raises(ConfigError, match=r"convert \*\.bin"):
        found(folder)


def test_missing_weights_are_named(folder: Path):
    (folder / "model-2-of-2.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"1 of the weight files .* first model-2-of-2"):
        found(folder)
    (folder / "model-1-of-2.safetensors").unlink()
    with pytest.raises(ConfigError, match="no weights there"):
        found(folder)


def test_a_pointer_in_place_of_weights_is_named(folder: Path):
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n"
    (folder / "model-2-of-2.safetensors").write_text(text)
    with pytest.raises(ConfigError, match=r"model-2-of-2\.safetensors is a pointer of Git LFS"):
        found(folder)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": []}', "{}"])
def test_an_index_that_cannot_be_read_is_named(folder: Path, content: str):
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ConfigError, match=r"index\.json cannot be read"):
        found(folder)
