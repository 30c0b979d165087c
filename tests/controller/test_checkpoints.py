"""Runs and checkpoints as files: listed, named, published, expired, deleted."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from skyrl_actors.controller.checkpoints import SAVED_BY, SPEC_FILE, CheckpointFolders
from skyrl_actors.messages.errors import Conflict, NotFound
from skyrl_actors.messages.model import LoraSpec, ModelSpec
from skyrl_actors.messages.paths import TinkerPath

SPEC = ModelSpec("s:train:0", "tiny", lora=LoraSpec(4))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def folders(tmp_path: Path, clock: Clock) -> CheckpointFolders:
    made = CheckpointFolders(tmp_path, clock)
    made.note_run(SPEC, "s", {"renderer_name": "qwen3"})
    return made


def saved(folders: CheckpointFolders, name: str, kind="weights", ttl_seconds: int | None = None, **metadata: str) -> TinkerPath:
    path = TinkerPath(SPEC.model_id, kind, name)
    folder = folders.folder(path)
    folder.mkdir(parents=True)
    (folder / SPEC_FILE).write_text(json.dumps(asdict(SPEC)))
    (folder / "model.bin").write_bytes(b"x" * 100)
    folders.note(folder, metadata, ttl_seconds)
    return path


def test_a_run_says_what_it_was_and_what_it_left(folders: CheckpointFolders, clock: Clock):
    saved(folders, "a", note="first")
    saved(folders, "b", "sampler_weights")
    clock.now = 2000.0
    folders.note_run(SPEC, "s", {"renderer_name": "other"})  # a repeat
    run = folders.run("s:train:0")
    assert (run.session_id, run.base_model, run.lora_rank, run.created_at) == ("s", "tiny", 4, 1000.0)
    assert run.user_metadata == {"renderer_name": "qwen3"}
    assert {c.path for c in run.checkpoints} == {"tinker://s:train:0/weights/a", "tinker://s:train:0/sampler_weights/b"}
    last = run.last("weights")
    assert last is not None and last.user_metadata == {"note": "first"} and last.num_bytes > 100 and not last.public
    assert folders.runs() == [run] and folders.checkpoints() == list(run.checkpoints)
    with pytest.raises(NotFound, match="no training run 's:train:1'"):
        folders.run("s:train:1")


def test_what_has_expired_is_gone_for_everybody(folders: CheckpointFolders, clock: Clock):
    path, other = saved(folders, "brief", ttl_seconds=60), saved(folders, "long")
    assert folders.existing(path)
    clock.now += 61
    with pytest.raises(NotFound, match="no checkpoint tinker://s:train:0/weights/brief"):
        folders.existing(path)
    assert [c.name for c in folders.checkpoints()] == ["long"]
    assert folders.new(path, False, "r") == folders.folder(path)  # the name is free
    assert folders.sweep() == 1 and not folders.folder(path).exists() and folders.folder(other).exists()


def test_ttl_and_publication_change_and_the_rest_stays(folders: CheckpointFolders, clock: Clock):
    path = saved(folders, "a", note="kept")
    folders.set_ttl(path, 10)
    folders.set_public(path, True)
    (entry,) = folders.checkpoints()
    assert entry.expires_at == clock.now + 10 and entry.public and entry.user_metadata == {"note": "kept"}
    folders.set_ttl(path, None)
    clock.now += 1e9
    assert folders.checkpoints()[0].expires_at is None and folders.existing(path)


def test_what_a_deletion_left_half_done_is_swept(folders: CheckpointFolders):
    path = saved(folders, "a")
    half = folders.folder(path).with_name(".b.deleted")
    half.mkdir()
    (half / SPEC_FILE).write_text("{}")
    assert [c.name for c in folders.checkpoints()] == ["a"]
    assert folders.sweep() == 0 and not half.exists() and folders.existing(path)


def test_a_version_outlives_a_copy_to_another_machine_and_not_another_save(folders: CheckpointFolders):
    path = saved(folders, "a", "sampler_weights")
    mark, spec = folders.folder(path) / SAVED_BY, folders.folder(path) / SPEC_FILE
    mark.write_text("r1")
    first, of_an_older_release = folders.version(path), f"{path}#{spec.stat().st_mtime_ns}"
    assert folders.is_version(path, first) and folders.is_version(path, of_an_older_release)
    os.utime(spec, (1, 1))
    assert folders.version(path) == first and not folders.is_version(path, of_an_older_release)
    mark.write_text("r2")
    assert not folders.is_version(path, first)
    folders.delete(path)
    with pytest.raises(NotFound):
        folders.is_version(path, first)


def test_deleted_is_deleted(folders: CheckpointFolders):
    path = saved(folders, "a")
    with pytest.raises(Conflict, match="exists already"):
        folders.new(path, False, "r")
    folders.delete(path)
    assert folders.checkpoints() == [] and not list(folders.folder(path).parent.iterdir())
    with pytest.raises(NotFound):
        folders.delete(path)
