"""Checkpoints that a job begins with: found, checked against the config, and linked."""

import json
from pathlib import Path
from typing import Any

import pytest

from skyrl_actors.commands.given_checkpoints import (
    REFERENCE,
    START,
    given_folders,
    link,
    with_links,
)
from skyrl_actors.config.job import JobConfig, RlConfig
from skyrl_actors.controller.checkpoints import CheckpointFolders
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.messages.paths import parse_path


def checkpoint(folder: Path, **changed: Any) -> Path:
    folder.mkdir(parents=True)
    spec = {"base_model": "tiny", "role": "policy", "lora": {"rank": 4}, **changed}
    (folder / "model_spec.json").write_text(json.dumps(spec))
    return folder


def config(checkpoints: Path, **job: Any) -> JobConfig:
    cluster = {
        "base_model": {"type": "tiny", "name": "tiny"},
        "policy": {},
        "critic": {},
        "checkpoint_dir": checkpoints,
    }
    return JobConfig.model_validate({"cluster": cluster, "job": {"type": "grpo", **job}})


def test_the_folder_of_a_run_stands_for_its_last_weights(tmp_path: Path):
    last = checkpoint(tmp_path / "runs/one/checkpoint")
    saved = checkpoint(tmp_path / "saved/s1_train_0/weights/w", lora={"rank": 4})
    for given, found in (
        (f"{tmp_path}/runs/one", last),
        (f"{tmp_path}/runs/one/checkpoint", last),
        ("tinker://s1:train:0/weights/w", saved),
    ):
        folders = given_folders(config(tmp_path / "saved", init_from=given, lora_rank=4))
        assert folders == {START: found}


@pytest.mark.parametrize(
    ("changed", "job", "message"),
    [
        ({"role": "critic"}, {"lora_rank": 4}, "is a critic; grpo trains a policy"),
        ({"base_model": "x"}, {"lora_rank": 4}, "is of x; cluster.base_model is tiny"),
        ({}, {}, "has an adapter of rank 4; set job.lora_rank=4"),
        (
            {"lora": {"rank": 4, "alpha": 16.0}},
            {"lora_rank": 4},
            r"has alpha 16; set cluster\.lora\.alpha=16",
        ),
        (
            {"lora": {"rank": 4, "train_mlp": False}},
            {"lora_rank": 4},
            "has an adapter without train_mlp; set job.train_mlp=false",
        ),
        (
            {"lora": {"rank": 4, "train_unembed": True}},
            {"lora_rank": 4, "train_unembed": False},
            "has an adapter with train_unembed; set job.train_unembed=true",
        ),
        ({"lora": None}, {"lora_rank": 4}, "has full weights; set job.lora_rank=null"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_anything_starts(
    tmp_path: Path, changed: dict[str, Any], job: dict[str, Any], message: str
):
    start = checkpoint(tmp_path / "start", **changed)
    with pytest.raises(ConfigError, match=f"job.init_from .* {message}"):
        given_folders(config(tmp_path, init_from=str(start), **job))


def test_what_is_no_checkpoint_is_refused(tmp_path: Path):
    for path in (str(tmp_path), "tinker://s1:train:0/weights/w"):
        with pytest.raises(ConfigError, match=r"job\.init_from"):
            given_folders(config(tmp_path, init_from=path, lora_rank=4))
    with pytest.raises(ConfigError, match=r"job\.reference\.path .* is no checkpoint"):
        given_folders(
            config(tmp_path, lora_rank=4, reference={"type": "checkpoint", "path": str(tmp_path)})
        )


def test_a_job_reads_given_checkpoints_below_its_own_folder(tmp_path: Path):
    start, reference = (checkpoint(tmp_path / name) for name in ("start", "reference"))
    whole = config(
        tmp_path,
        init_from=str(start),
        lora_rank=4,
        reference={"type": "checkpoint", "path": str(reference)},
    )
    given, linked = given_folders(whole), with_links(whole).job
    assert isinstance(linked, RlConfig) and linked.init_from == START
    assert linked.reference.type == "checkpoint" and linked.reference.path == REFERENCE
    for _ in range(2):  # a resumed run links again
        link(given, tmp_path / "own")
    folders = CheckpointFolders(tmp_path / "own")
    assert folders.existing(parse_path(START)).resolve() == start
    assert folders.existing(parse_path(REFERENCE)).resolve() == reference
