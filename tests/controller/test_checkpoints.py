"""Files of runs and checkpoints: listing, metadata, publication, expiry, deletion."""

import json
import os
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from skyrl_actors.controller.checkpoints import RUN_FILE, SAVED_BY, SPEC_FILE, CheckpointFolders
from skyrl_actors.controller.session_catalog import SessionCatalog
from skyrl_actors.controller.tenants import TenantTable
from skyrl_actors.messages.catalog import SessionNote
from skyrl_actors.messages.errors import Conflict, Corrupt, NotFound
from skyrl_actors.messages.model import LoraSpec, ModelSpec
from skyrl_actors.messages.paths import TinkerPath
from skyrl_actors.storage.files import write_durably

SPEC = ModelSpec(model_id="s:train:0", base_model="tiny", lora=LoraSpec(rank=4))


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


def saved(
    folders: CheckpointFolders,
    name: str,
    kind="weights",
    ttl_seconds: int | None = None,
    **metadata: str,
) -> TinkerPath:
    path = TinkerPath(SPEC.model_id, kind, name)
    folder = folders.folder(path)
    folder.mkdir(parents=True)
    (folder / SPEC_FILE).write_text(json.dumps(asdict(SPEC)))
    (folder / "model.bin").write_bytes(b"x" * 100)
    folders.note(folder, metadata, ttl_seconds)
    return path


def swept(folders: CheckpointFolders) -> int:
    return sum(folders.removal.remove_expired(folder) for _, folder in folders.removal.expired())


def test_a_run_lists_its_model_and_its_checkpoints(folders: CheckpointFolders, clock: Clock):
    saved(folders, "a", note="first")
    saved(folders, "b", "sampler_weights")
    clock.now = 2000.0
    folders.note_run(SPEC, "s", {"renderer_name": "other"})  # a repeat
    run = folders.run("s:train:0")
    assert (run.session_id, run.base_model, run.lora_rank, run.created_at) == (
        "s",
        "tiny",
        4,
        1000.0,
    )
    assert run.user_metadata == {"renderer_name": "qwen3"}
    assert {c.path for c in run.checkpoints} == {
        "tinker://s:train:0/weights/a",
        "tinker://s:train:0/sampler_weights/b",
    }
    last = run.last("weights")
    assert (
        last is not None
        and last.user_metadata == {"note": "first"}
        and last.num_bytes > 100
        and not last.public
    )
    assert folders.runs() == [run] and folders.checkpoints() == list(run.checkpoints)
    with pytest.raises(NotFound, match="no training run 's:train:1'"):
        folders.run("s:train:1")


def test_an_expired_checkpoint_is_gone_for_all_readers(folders: CheckpointFolders, clock: Clock):
    path, other = saved(folders, "brief", ttl_seconds=60), saved(folders, "long")
    assert folders.existing(path)
    clock.now += 61
    with pytest.raises(NotFound, match="no checkpoint tinker://s:train:0/weights/brief"):
        folders.existing(path)
    assert [c.name for c in folders.checkpoints()] == ["long"]
    assert folders.new(path, False, "r") == folders.folder(path)  # the name is free
    assert (
        swept(folders) == 1 and not folders.folder(path).exists() and folders.folder(other).exists()
    )


def test_changing_ttl_and_publication_keeps_other_metadata(
    folders: CheckpointFolders, clock: Clock
):
    path = saved(folders, "a", note="kept")
    folders.set_ttl(path, 10)
    folders.set_public(path, True)
    (entry,) = folders.checkpoints()
    assert (
        entry.expires_at == clock.now + 10
        and entry.public
        and entry.user_metadata == {"note": "kept"}
    )
    folders.set_ttl(path, None)
    clock.now += 1e9
    assert folders.checkpoints()[0].expires_at is None and folders.existing(path)


def test_an_interrupted_deletion_is_completed_by_the_sweep(folders: CheckpointFolders):
    path = saved(folders, "a")
    half = folders.folder(path).with_name(".b.deleted")
    half.mkdir()
    (half / SPEC_FILE).write_text("{}")
    assert [c.name for c in folders.checkpoints()] == ["a"]
    assert swept(folders) == 0 and not half.exists() and folders.existing(path)


def test_a_version_survives_a_copy_to_another_machine_but_not_another_save(
    folders: CheckpointFolders,
):
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


def test_a_deleted_checkpoint_cannot_be_used(folders: CheckpointFolders):
    path = saved(folders, "a")
    with pytest.raises(Conflict, match="exists already"):
        folders.new(path, False, "r")
    folders.delete(path)
    assert folders.checkpoints() == [] and not list(folders.folder(path).parent.iterdir())
    with pytest.raises(NotFound):
        folders.delete(path)


def test_a_damaged_file_hides_only_itself(folders: CheckpointFolders, clock: Clock, tmp_path: Path):
    """The files are empty, cut off, or from another version, as after a power cut."""
    brief, kept = saved(folders, "brief", ttl_seconds=60), saved(folders, "kept")
    for number, content in enumerate(("", "{", "[]", '{"run_id": "x"}', '{"strange": 1}')):
        run = tmp_path / f"s_train_{number + 1}"
        (run / "weights" / "a").mkdir(parents=True)
        (run / "weights" / "a" / SPEC_FILE).write_text("{}")
        (run / RUN_FILE).write_text(content)
    notes = tmp_path / "s_train_0" / "weights"
    for name, content in (
        ("empty", ""),
        ("strange", '{"strange": 1, "expires_at": "soon"}'),
        ("far", '{"expires_at": 1e18}'),
    ):
        (notes / name).mkdir()
        (notes / name / SPEC_FILE).write_text("")
        (notes / name / "about.json").write_text(content)
    (run_entry,) = folders.runs()
    assert {c.name for c in run_entry.checkpoints} == {"brief", "kept", "empty", "strange", "far"}
    assert all(
        datetime.fromtimestamp(c.expires_at, UTC) for c in run_entry.checkpoints if c.expires_at
    )
    with pytest.raises(NotFound, match=r"its run.json is damaged"):
        folders.run("s:train:1")
    with pytest.raises(Corrupt, match=r"is damaged: its model_spec.json"):
        folders.spec(TinkerPath("s:train:0", "weights", "empty"))
    clock.now += 61
    assert swept(folders) == 1 and not folders.folder(brief).exists() and folders.existing(kept)
    folders.note_run(
        replace(SPEC, model_id="s:train:1"), "s", {}
    )  # its model is live, so the lost values are known
    assert {run.run_id for run in folders.runs()} == {"s:train:0", "s:train:1"}


def test_a_damaged_session_record_hides_only_itself(
    folders: CheckpointFolders, clock: Clock, tmp_path: Path
):
    catalog = SessionCatalog(TenantTable(), folders, clock)
    for session_id in ("s1", "s2"):
        catalog.opened(
            SessionNote(session_id=session_id, created_at=clock.now, user_metadata={"who": "me"})
        )
    (tmp_path / ".sessions" / "s1.json").write_text("")
    assert [entry.note.session_id for entry in catalog.sessions()] == ["s2", "s"]
    catalog.opened(SessionNote(session_id="s1", created_at=clock.now))
    assert {entry.note.session_id for entry in catalog.sessions()} == {"s1", "s2", "s"}
    (tmp_path / ".sessions" / "s1.json").write_text("{")
    clock.now += 1000
    catalog.sweep(100)
    assert [entry.note.session_id for entry in catalog.sessions()] == ["s"]


def test_the_longest_ttl_is_still_a_date(folders: CheckpointFolders):
    saved(folders, "a", ttl_seconds=10**15)
    (entry,) = folders.checkpoints()
    assert (
        entry.expires_at is not None and datetime.fromtimestamp(entry.expires_at, UTC).year < 10_000
    )


def test_a_json_file_is_synced_before_it_replaces_the_old_one(tmp_path: Path):
    """A trace shows the sync before the rename, and a separate file for each writer."""
    seen: list[str] = []
    real = {name: getattr(os, name) for name in ("fsync", "replace", "rename")}
    with pytest.MonkeyPatch.context() as patch:
        for name, call in real.items():
            patch.setattr(
                os,
                name,
                lambda *a, _name=name, _call=call: (seen.append(f"{_name} {a[0]}"), _call(*a))[1],
            )
        for _ in range(2):
            write_durably(tmp_path / "a.json", "{}")
    kinds = [line.split()[0] for line in seen]
    assert kinds == ["fsync", "replace", "fsync"] * 2 and seen[1] != seen[4]
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
