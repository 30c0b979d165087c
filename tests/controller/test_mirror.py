"""Mirrors of checkpoints on a disk and on a real S3 server.

No save is answered before the mirror has it.
"""

import asyncio
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from skyrl_actors.config.environments import DatasetConfig
from skyrl_actors.controller.checkpoints import RUN_FILE, SPEC_FILE, CheckpointFolders
from skyrl_actors.jobs.datasets import read
from skyrl_actors.messages.errors import ConfigError, NotFound
from skyrl_actors.messages.model import LoraSpec, ModelSpec
from skyrl_actors.messages.paths import TinkerPath
from skyrl_actors.storage import mirror
from skyrl_actors.storage.mirror import WHOLE
from tests.api.local import MODEL, config_for, edge, posted

SPEC = ModelSpec(model_id="s1:train:0", base_model="tiny", lora=LoraSpec(rank=4))
ONE, TWO = TinkerPath("s1:train:0", "weights", "one"), TinkerPath("s1:train:0", "weights", "two")


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return (
        f"{request.getfixturevalue('s3')}/checkpoints/{time.time_ns()}"
        if request.param == "s3"
        else (tmp_path / "there").as_uri()
    )


def saved(folders: CheckpointFolders, path: TinkerPath, weights: bytes) -> None:
    folders.note(folder_of(folders, path, weights), {"who": "ann"}, None)


def folder_of(folders: CheckpointFolders, path: TinkerPath, weights: bytes) -> Path:
    """Write a checkpoint's files, without its notes."""
    import json
    from dataclasses import asdict

    folders.note_run(SPEC, "s1", {})
    folder = folders.folder(path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / SPEC_FILE).write_text(json.dumps(asdict(SPEC)))
    return folder


def test_a_start_does_not_ask_for_each_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    here = CheckpointFolders(tmp_path / "a", mirror_url=(tmp_path / "there").as_uri())
    for number in range(20):
        saved(here, TinkerPath("s1:train:0", "weights", f"n{number}"), b"w")
    asked = list[str]()
    said = mirror.said

    def counted(url: str) -> AbstractContextManager[AbstractFileSystem]:
        asked.append(url)
        return said(url)

    monkeypatch.setattr(mirror, "said", counted)
    assert here.align() == 0
    assert len(asked) == 1


def test_another_machine_fetches_all_answered_checkpoints(tmp_path: Path, url: str):
    here = CheckpointFolders(tmp_path / "a", mirror_url=url)
    assert here.align() == 0
    saved(here, ONE, b"first")
    saved(here, TWO, b"second")
    saved(here, ONE, b"first, saved again")
    here.set_public(TWO, True)
    there = CheckpointFolders(tmp_path / "b", mirror_url=url)
    assert there.align() == 2 and there.align() == 0
    assert (there.existing(ONE) / "model.safetensors").read_bytes() == b"first, saved again"
    assert there.spec(TWO) == SPEC and there.is_public(TWO) and not there.is_public(ONE)
    (run,) = there.runs()
    assert {c.name for c in run.checkpoints} == {"one", "two"} and run.checkpoints[
        0
    ].user_metadata == {"who": "ann"}
    there.delete(ONE)
    third = CheckpointFolders(tmp_path / "c", mirror_url=url)
    assert third.align() == 1
    with pytest.raises(NotFound):
        third.existing(ONE)


def test_a_partial_folder_on_the_mirror_is_not_fetched(tmp_path: Path, url: str):
    here = CheckpointFolders(tmp_path / "a", mirror_url=url)
    saved(here, ONE, b"first")
    files, base = url_to_fs(url)
    files.rm_file(f"{base}/s1_train_0/weights/one/{WHOLE}")
    there = CheckpointFolders(tmp_path / "b", mirror_url=url)
    assert (
        there.align() == 0
        and (tmp_path / "b/s1_train_0" / RUN_FILE).exists()
        and not there.runs()[0].checkpoints
    )


def test_a_checkpoint_without_notes_is_not_copied_yet(tmp_path: Path, url: str):
    """A crash came between its files and their encryption; the repeated request completes it."""
    folder = folder_of(CheckpointFolders(tmp_path / "a"), ONE, b"plain")
    assert CheckpointFolders(tmp_path / "a", mirror_url=url).align() == 0
    assert CheckpointFolders(tmp_path / "b", mirror_url=url).align() == 0
    CheckpointFolders(tmp_path / "a", mirror_url=url).note(folder, {}, None)
    assert CheckpointFolders(tmp_path / "b", mirror_url=url).align() == 1


def test_checkpoints_from_before_the_mirror_are_copied_to_it(tmp_path: Path, url: str):
    saved(CheckpointFolders(tmp_path / "a"), ONE, b"first")
    assert CheckpointFolders(tmp_path / "a", mirror_url=url).align() == 0
    assert CheckpointFolders(tmp_path / "b", mirror_url=url).align() == 1


def test_a_copy_is_answered_after_the_mirror_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    here = CheckpointFolders(tmp_path / "a", mirror_url=(tmp_path / "there").as_uri())
    saved(here, ONE, b"first")
    target = TinkerPath("s2:train:0", "weights", "copied")
    with monkeypatch.context() as patch:
        patch.setattr(
            mirror.Mirror, "put", lambda self, folder: (_ for _ in ()).throw(OSError("away"))
        )
        for _ in range(2):
            with pytest.raises(OSError, match="away"):
                here.copy(ONE, target, "s2", None)
    here.copy(ONE, target, "s2", None)
    there = CheckpointFolders(tmp_path / "b", mirror_url=(tmp_path / "there").as_uri())
    assert (
        there.align() == 2
        and (there.existing(target) / "model.safetensors").read_bytes() == b"first"
    )


def test_an_interrupted_overwrite_keeps_the_old_checkpoint(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
):
    here = CheckpointFolders(tmp_path / "a", mirror_url=url)
    saved(here, ONE, b"first")
    files = url_to_fs(url)[0]
    with monkeypatch.context() as patch:
        patch.setattr(
            files, "pipe_file", lambda *_, **__: (_ for _ in ()).throw(OSError("the power went"))
        )
        with pytest.raises(OSError, match="the power went"):
            saved(here, ONE, b"second")
    there = CheckpointFolders(tmp_path / "b", mirror_url=url)
    assert (
        there.align() == 1 and (there.existing(ONE) / "model.safetensors").read_bytes() == b"first"
    )


async def test_a_save_waits_while_the_mirror_is_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The request passes the HTTP edge and a lane, and is answered after the mirror has it."""
    there = (tmp_path / "there").as_uri()
    config = config_for(tmp_path, checkpoint_mirror=there)
    async with edge(config) as http:
        session = (await posted(http, "/create_session", tags=[], sdk_version="0.5.0"))[
            "session_id"
        ]
        made = await posted(
            http,
            "/create_model",
            session_id=session,
            model_seq_id=0,
            base_model=MODEL,
            lora_config={"rank": 4},
        )
        await posted(http, "/retrieve_future", request_id=made["request_id"])
        with monkeypatch.context() as patch:
            patch.setattr(
                mirror.Mirror, "put", lambda self, folder: (_ for _ in ()).throw(OSError("away"))
            )
            saving = await posted(
                http, "/save_weights", model_id=made["model_id"], path="one", seq_id=1
            )
            answer = asyncio.create_task(
                posted(http, "/retrieve_future", request_id=saving["request_id"])
            )
            await asyncio.sleep(1.0)
            assert not answer.done() and not list((tmp_path / "there").rglob("WHOLE"))
        assert (await asyncio.wait_for(answer, 20))["path"].endswith("/weights/one")
        assert len(list((tmp_path / "there").rglob("WHOLE"))) == 1


def test_an_unreachable_mirror_raises_an_os_error(tmp_path: Path, s3: str):
    here = CheckpointFolders(tmp_path / "a", mirror_url="s3://no-such-bucket/x")
    with pytest.raises(OSError, match="no-such-bucket"):
        saved(here, ONE, b"first")
    with pytest.raises(ConfigError, match="the protocol nowhere is not known"):
        CheckpointFolders(tmp_path / "b", mirror_url="nowhere://x")


def test_datasets_are_read_from_s3(tmp_path: Path, s3: str):
    import pyarrow
    from pyarrow import parquet

    files = url_to_fs(s3)[0]
    files.pipe_file("bucket/data/rows.jsonl", b'{"prompt": "a"}\n{"prompt": "b"}\n')
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"]}), tmp_path / "rows.parquet")
    files.put_file(str(tmp_path / "rows.parquet"), "bucket/data/rows.parquet")
    for name in ("rows.jsonl", "rows.parquet"):
        assert [
            row["prompt"]
            for row in read(DatasetConfig(path=f"s3://bucket/data/{name}"), ["prompt"])
        ] == ["a", "b"]
    with pytest.raises(ConfigError, match=r"s3://bucket/data/none\.jsonl"):
        read(DatasetConfig(path="s3://bucket/data/none.jsonl"), ["prompt"])
    assert mirror.is_url("s3://x") and not mirror.is_url("/x/y")
