"""A checkpoint that is saved again while it is loaded or copied is read as one save."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from skyrl_actors.controller.checkpoints import SAVED_BY, CheckpointFolders
from skyrl_actors.controller.controller import Controller
from skyrl_actors.controller.verbs import load_weights
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.errors import Conflict
from skyrl_actors.messages.model import LoraSpec, ModelSpec
from skyrl_actors.messages.paths import TinkerPath, parse_path
from tests.controller.test_controller import done, model_in
from tests.controller.test_mirror import ONE, saved
from tests.controller.test_used_ids import started
from tests.fakes import FakeBackend

TARGET = TinkerPath("s2:train:0", "weights", "copied")


class SavedAgain(FakeBackend):
    """A backend beside which the checkpoint is saved again during the first loads."""

    def __init__(self, times: int):
        super().__init__()
        self.times, self.loads = times, 0

    async def load_checkpoint(self, *arguments: Any, **named: Any) -> None:
        await super().load_checkpoint(*arguments, **named)
        self.numbers[arguments[0].model_id] = arguments[1].number
        self.loads += 1
        if self.loads <= self.times:
            (Path(arguments[2]) / SAVED_BY).write_text(f"save {self.loads}")


async def saved_model(controller: Controller) -> tuple[str, str, str]:
    """Return a session, its model, and a checkpoint of it."""
    session, model_id = await model_in(controller)
    save = rq.SaveWeights(model_id=model_id, name="last", seq_id=1)
    answer = await done(controller, await controller.submit(save))
    assert isinstance(answer, rs.Saved)
    return session, model_id, answer.path


async def test_a_load_is_repeated_on_a_restored_model(tmp_path: Path):
    backend = SavedAgain(1)
    controller = await started(tmp_path, backend)
    _, model_id, path = await saved_model(controller)
    request = rq.LoadWeights(model_id=model_id, path=path, seq_id=2, with_optimizer=True)
    answer = await done(controller, await controller.submit(request))
    assert isinstance(answer, rs.Loaded)
    assert answer.version == controller.folders.version(parse_path(path))
    verbs = [verb for verb, _ in backend.calls]
    first = verbs.index("load_checkpoint")
    again = verbs.index("load_checkpoint", first + 1)
    assert "create_model" in verbs[first:again], "ranks with different weights were used"
    await controller.close()


async def test_a_load_that_cannot_be_checked_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A repeat of the operation alone would get the known result of the ranks."""
    monkeypatch.setattr(load_weights, "CHECK_PAUSE_S", 0.0)
    backend = SavedAgain(1)
    controller = await started(tmp_path, backend)
    _, model_id, path = await saved_model(controller)
    faults = [OSError(116, "Stale file handle")] * load_weights.CHECKS
    check = load_weights.is_saved_again

    def stale(*arguments: Any) -> bool:
        if faults:
            raise faults.pop()
        return check(*arguments)

    monkeypatch.setattr(load_weights, "is_saved_again", stale)
    request = rq.LoadWeights(model_id=model_id, path=path, seq_id=2, with_optimizer=True)
    assert isinstance(await done(controller, await controller.submit(request)), rs.Loaded)
    assert backend.loads == 2 and not faults
    await controller.close()


async def test_a_load_that_a_dead_controller_began_is_repeated(tmp_path: Path):
    """The ranks report it as applied, and its checkpoint may have been saved again since."""
    backend = SavedAgain(0)
    controller = await started(tmp_path, backend)
    _, model_id, path = await saved_model(controller)
    request = rq.LoadWeights(model_id=model_id, path=path, seq_id=2, with_optimizer=True)
    load = backend.load_checkpoint

    async def loaded(*arguments: Any, **named: Any) -> None:
        await load(*arguments, **named)
        await asyncio.Event().wait()  # the controller dies here

    backend.load_checkpoint = loaded  # type: ignore[method-assign]
    request_id = await controller.submit(request)
    async with asyncio.timeout(10):
        while not backend.loads:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await controller.abandon()
    del backend.load_checkpoint
    again = await started(tmp_path, backend)
    assert isinstance(await done(again, request_id), rs.Loaded)
    first = next(i for i, (verb, _) in enumerate(backend.calls) if verb == "load_checkpoint")
    assert ("create_model", model_id) in backend.calls[first:]
    assert backend.loads == 2
    await again.close()


async def test_a_model_is_filled_from_one_save(tmp_path: Path):
    backend = SavedAgain(2)
    controller = await started(tmp_path, backend)
    session, _, path = await saved_model(controller)
    spec = ModelSpec(model_id=f"{session}:train:1", base_model="tiny", lora=LoraSpec(rank=4))
    request = rq.CreateModel(spec=spec, session_id=session, from_path=path)
    assert isinstance(await done(controller, await controller.submit(request)), rs.Loaded)
    own = [verb for verb, model_id in backend.calls if model_id == spec.model_id]
    fill = ["create_model", "load_checkpoint"]
    assert own[:8] == [*fill, "delete_model", *fill, "delete_model", *fill]
    await controller.close()


async def test_a_checkpoint_that_is_always_saved_again_is_refused(tmp_path: Path):
    backend = SavedAgain(1000)
    controller = await started(tmp_path, backend)
    session, _, path = await saved_model(controller)
    spec = ModelSpec(model_id=f"{session}:train:1", base_model="tiny", lora=LoraSpec(rank=4))
    request = rq.CreateModel(spec=spec, session_id=session, from_path=path)
    answer = await done(controller, await controller.submit(request))
    assert isinstance(answer, rs.Failure) and "was saved again during each" in answer.message
    assert spec.model_id not in backend.models
    await controller.close()


def copied_beside(monkeypatch: pytest.MonkeyPatch, folders: CheckpointFolders, saves: int) -> None:
    """Let the checkpoint be saved again at the second file of each of the first copies."""
    copy, count = shutil.copyfile, [0, 0]

    def slow(source: Path, target: Path) -> Path:
        count[0] += 1
        if count[0] % 2 == 0 and count[1] < saves:
            count[1] += 1
            (folders.folder(ONE) / SAVED_BY).write_text(f"again {count[1]}")
            for name in ("model.safetensors", "optimizer.safetensors"):
                (folders.folder(ONE) / name).write_text(f"save {count[1]}")
        return copy(source, target)

    monkeypatch.setattr("skyrl_actors.controller.checkpoints.shutil.copyfile", slow)


@pytest.fixture
def folders(tmp_path: Path) -> CheckpointFolders:
    found = CheckpointFolders(tmp_path / "a")
    saved(found, ONE, b"save 0")
    (found.folder(ONE) / "optimizer.safetensors").write_text("save 0")
    (found.folder(ONE) / SAVED_BY).write_text("first")
    return found


def left_in(folders: CheckpointFolders) -> list[Path]:
    return list((folders.root / "s2_train_0").glob("weights/.*"))


def test_a_copy_has_the_files_of_one_save(
    folders: CheckpointFolders, monkeypatch: pytest.MonkeyPatch
):
    copied_beside(monkeypatch, folders, 1)
    folders.copy(ONE, TARGET, "s2", None)
    texts = {file.read_text() for file in folders.files_for_others(TARGET)}
    assert texts == {"save 1"} and not left_in(folders)


def test_a_copy_of_a_checkpoint_that_is_always_saved_again_is_refused(
    folders: CheckpointFolders, monkeypatch: pytest.MonkeyPatch
):
    copied_beside(monkeypatch, folders, 1000)
    with pytest.raises(Conflict, match="was saved again during each"):
        folders.copy(ONE, TARGET, "s2", None)
    assert not folders.folder(TARGET).exists() and not left_in(folders)


def test_a_failed_copy_leaves_nothing(folders: CheckpointFolders, monkeypatch: pytest.MonkeyPatch):
    def full(source: Path, target: Path) -> None:
        target.write_text("half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("skyrl_actors.controller.checkpoints.shutil.copyfile", full)
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                folders.copy(ONE, TARGET, "s2", None)
    assert not left_in(folders)


def test_what_a_killed_copy_left_is_swept(
    folders: CheckpointFolders, monkeypatch: pytest.MonkeyPatch
):
    left = folders.root / "s2_train_0" / "weights" / ".copied.abc.partial"
    left.mkdir(parents=True)
    folders.removal.expired()
    assert left.exists(), "it may be in progress"
    monkeypatch.setattr("skyrl_actors.controller.notes.ABANDONED_S", -1.0)
    folders.removal.expired()
    assert not left.exists()
