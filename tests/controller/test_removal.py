"""An expired checkpoint that is saved again while it is removed stays, also in its mirror."""

import asyncio
import json
import os
import threading
from dataclasses import asdict
from pathlib import Path

import pytest

from skyrl_actors.controller.checkpoints import SPEC_FILE, CheckpointFolders
from skyrl_actors.controller.disk import Disk
from skyrl_actors.controller.housekeeping import sweep_checkpoints
from skyrl_actors.messages.model import LoraSpec, ModelSpec
from skyrl_actors.messages.paths import TinkerPath
from skyrl_actors.workers.checkpoint import replace_folder

SPEC = ModelSpec(model_id="s:train:0", base_model="tiny", lora=LoraSpec(rank=4))
PATH = TinkerPath(SPEC.model_id, "weights", "latest")


class Saved:
    """Checkpoints with a mirror, and a clock. A rank writes one as `save_checkpoint` does."""

    def __init__(self, root: Path):
        self.now = 1000.0
        self.folders = CheckpointFolders(root / "own", lambda: self.now, f"file://{root}/mirror")
        self.folders.note_run(SPEC, "s", {})
        self.disk = Disk()
        self.mirror = root / "mirror"

    def write(self, content: str) -> Path:
        folder = self.folders.new(PATH, False, content)
        staging = folder.with_name(f".{folder.name}.{content}.partial")
        staging.mkdir(parents=True)
        (staging / SPEC_FILE).write_text(json.dumps(asdict(SPEC)))
        (staging / "model.bin").write_text(content)
        if folder.exists():
            folder.rename(folder.with_name(f".{folder.name}.{content}.old"))
        staging.rename(folder)
        return folder

    async def save(self, content: str) -> None:
        folder = await self.disk.read(self.write, content)
        await self.disk.note(PATH.model_id, self.folders.note, folder, {}, 60)

    def contents(self) -> list[str]:
        copies = self.mirror.rglob("model.bin")
        return [(self.folders.existing(PATH) / "model.bin").read_text()] + [
            copy.read_text() for copy in copies
        ]


@pytest.fixture
async def saved(tmp_path: Path) -> Saved:
    made = Saved(tmp_path)
    await made.save("old")
    made.now += 61
    return made


async def test_a_checkpoint_that_is_saved_during_its_removal_stays(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
):
    begun, go_on = threading.Event(), threading.Event()
    mirror = saved.folders.removal._mirror
    assert mirror is not None
    remove = mirror.remove

    def slow(folder: Path) -> None:  # remote storage takes a moment
        begun.set()
        assert go_on.wait(10)
        remove(folder)

    monkeypatch.setattr(mirror, "remove", slow)
    sweeping = asyncio.create_task(sweep_checkpoints(saved.folders, saved.disk))
    assert await asyncio.to_thread(begun.wait, 10)
    saving = asyncio.create_task(saved.save("new"))
    await asyncio.sleep(0.05)
    go_on.set()
    await saving
    await sweeping
    assert saved.contents() == ["new", "new"]


async def test_a_checkpoint_that_was_saved_just_before_its_removal_comes_back(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
):
    metadata, looks = saved.folders.removal._metadata, list[Path]()
    is_expired = metadata.is_expired

    def and_then_a_rank_saves(folder: Path) -> bool:
        looks.append(folder)
        found = is_expired(folder)
        if len(looks) == 2:  # the first look is that of the listing
            saved.write("new")
        return found

    monkeypatch.setattr(metadata, "is_expired", and_then_a_rank_saves)
    assert await sweep_checkpoints(saved.folders, saved.disk) == 0
    monkeypatch.undo()
    assert (saved.folders.folder(PATH) / "model.bin").read_text() == "new"


async def test_a_checkpoint_stays_while_its_mirror_cannot_be_reached(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
):
    def fails(folder: Path) -> None:
        raise OSError("no route")

    monkeypatch.setattr(saved.folders.removal._mirror, "remove", fails)
    assert await sweep_checkpoints(saved.folders, saved.disk) == 0
    monkeypatch.undo()
    assert saved.folders.folder(PATH).exists()
    assert await sweep_checkpoints(saved.folders, saved.disk) == 1
    assert not saved.folders.folder(PATH).exists() and not [*saved.mirror.rglob("model.bin")]


async def test_what_killed_ranks_replaced_is_removed_and_in_nobodys_way(tmp_path: Path):
    saved = Saved(tmp_path)
    await saved.save("1")
    folder = saved.folders.existing(PATH)
    left = folder.with_name(f".{folder.name}.77.old")
    own = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    for old in (left, own):
        old.mkdir()
        (old / "model.bin").write_text("old")
    staging = folder.with_name(f".{folder.name}.new.partial")
    staging.mkdir()
    (staging / "model.bin").write_text("new")
    replace_folder(staging, folder)
    assert (folder / "model.bin").read_text() == "new" and not own.exists()
    await sweep_checkpoints(saved.folders, saved.disk)
    assert left.exists()  # its rank may be removing it
    os.utime(left, (1, 1))
    await sweep_checkpoints(saved.folders, saved.disk)
    assert not left.exists() and folder.exists()
