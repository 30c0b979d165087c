"""Mirrors of checkpoints on a disk and on a real S3 server.

No save is answered before the mirror has it.
"""

import asyncio
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from skyrl_actors.config.environments import DatasetConfig
from skyrl_actors.controller import mirroring
from skyrl_actors.controller.checkpoints import RUN_FILE, SPEC_FILE, CheckpointFolders, keeps_all
from skyrl_actors.controller.disk import Disk
from skyrl_actors.jobs.datasets import read
from skyrl_actors.messages.errors import ConfigError, Conflict, NotFound, Unavailable
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
    assert here.alignment.all() == 0
    assert len(asked) == 1


def test_another_machine_fetches_all_answered_checkpoints(tmp_path: Path, url: str):
    here = CheckpointFolders(tmp_path / "a", mirror_url=url)
    assert here.alignment.all() == 0
    saved(here, ONE, b"first")
    saved(here, TWO, b"second")
    saved(here, ONE, b"first, saved again")
    here.set_public(TWO, True)
    there = CheckpointFolders(tmp_path / "b", mirror_url=url)
    assert there.alignment.all() == 2 and there.alignment.all() == 0
    assert (there.existing(ONE) / "model.safetensors").read_bytes() == b"first, saved again"
    assert there.spec(TWO) == SPEC and there.is_public(TWO) and not there.is_public(ONE)
    (run,) = there.runs()
    assert {c.name for c in run.checkpoints} == {"one", "two"} and run.checkpoints[
        0
    ].user_metadata == {"who": "ann"}
    there.delete(ONE)
    third = CheckpointFolders(tmp_path / "c", mirror_url=url)
    assert third.alignment.all() == 1
    with pytest.raises(NotFound):
        third.existing(ONE)


def test_a_partial_folder_on_the_mirror_is_not_fetched(tmp_path: Path, url: str):
    here = CheckpointFolders(tmp_path / "a", mirror_url=url)
    saved(here, ONE, b"first")
    files, base = url_to_fs(url)
    files.rm_file(f"{base}/s1_train_0/weights/one/{WHOLE}")
    there = CheckpointFolders(tmp_path / "b", mirror_url=url)
    assert (
        there.alignment.all() == 0
        and (tmp_path / "b/s1_train_0" / RUN_FILE).exists()
        and not there.runs()[0].checkpoints
    )


def test_a_checkpoint_without_notes_is_not_copied_yet(tmp_path: Path, url: str):
    """A crash came between its files and their encryption; the repeated request completes it."""
    folder = folder_of(CheckpointFolders(tmp_path / "a"), ONE, b"plain")
    assert CheckpointFolders(tmp_path / "a", mirror_url=url).alignment.all() == 0
    assert CheckpointFolders(tmp_path / "b", mirror_url=url).alignment.all() == 0
    CheckpointFolders(tmp_path / "a", mirror_url=url).note(folder, {}, None)
    assert CheckpointFolders(tmp_path / "b", mirror_url=url).alignment.all() == 1


def test_checkpoints_from_before_the_mirror_are_copied_to_it(tmp_path: Path, url: str):
    saved(CheckpointFolders(tmp_path / "a"), ONE, b"first")
    assert CheckpointFolders(tmp_path / "a", mirror_url=url).alignment.all() == 0
    assert CheckpointFolders(tmp_path / "b", mirror_url=url).alignment.all() == 1


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
        there.alignment.all() == 2
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
        there.alignment.all() == 1
        and (there.existing(ONE) / "model.safetensors").read_bytes() == b"first"
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


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why the storage of mirrors is away; it is there while the list is empty."""
    reasons, said = list[str](), mirror.said

    @contextmanager
    def unreachable(url: str) -> Iterator[AbstractFileSystem]:
        if reasons:
            raise OSError(reasons[0])
        with said(url) as files:
            yield files

    monkeypatch.setattr(mirror, "said", unreachable)
    monkeypatch.setattr(mirroring, "RETRY_S", 0.05)
    return reasons


async def test_a_service_with_checkpoints_starts_while_the_mirror_is_away(
    tmp_path: Path, away: list[str]
):
    three = TinkerPath("s2:train:0", "weights", "three")
    config = config_for(tmp_path, checkpoint_mirror=(tmp_path / "there").as_uri())
    here = CheckpointFolders(config.checkpoint_dir, mirror_url=config.checkpoint_mirror)
    saved(here, ONE, b"first")
    saved(here, TWO, b"second")
    shutil.rmtree(here.folder(TWO))
    plain = CheckpointFolders(config.checkpoint_dir)
    plain.note_run(replace(SPEC, model_id=three.model_id), "s2", {})
    shutil.copytree(here.folder(ONE), here.folder(three))
    away.append("the storage is away")
    async with edge(config) as http:

        async def asked(path: TinkerPath) -> tuple[int, str]:
            answer = await http.post("/weights_info", json={"tinker_path": str(path)})
            return answer.status_code, answer.text

        assert (await asked(ONE))[0] == 200
        status, text = await asked(TWO)
        assert status == 503 and "the storage is away" in text
        assert (await http.get("/training_runs/s3:train:0")).status_code == 503
        assert (await http.get("/training_runs")).status_code == 503
        assert not list((tmp_path / "there").rglob("three"))
        away.clear()
        async with asyncio.timeout(20):
            while (await http.get("/training_runs")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert (await asked(TWO))[0] == 200
        assert (await http.get("/training_runs/s3:train:0")).status_code == 404
        assert len(list((tmp_path / "there").rglob("three/WHOLE"))) == 1


async def test_a_machine_without_checkpoints_waits_for_the_mirror(tmp_path: Path, away: list[str]):
    folders = CheckpointFolders(tmp_path / "a", mirror_url=(tmp_path / "there").as_uri())
    away.append("the storage is away")
    with pytest.raises(Unavailable, match="cannot be fetched: the storage is away"):
        await mirroring.begin(folders.alignment, Disk())
    away.clear()
    await mirroring.begin(folders.alignment, Disk())
    assert folders.alignment.away is None


async def test_nothing_is_saved_under_a_name_that_the_mirror_may_have(
    tmp_path: Path, away: list[str], url: str
):
    folders = CheckpointFolders(tmp_path / "a", mirror_url=url)
    saved(folders, ONE, b"first")
    saved(folders, TWO, b"second")
    shutil.rmtree(folders.folder(TWO))
    away.append("the storage is away")
    disk = Disk()
    await mirroring.begin(folders.alignment, disk)
    for unknown in (
        lambda: folders.to_save(TWO, True, "r1"),
        lambda: folders.copy(ONE, TinkerPath("s2:train:0", "weights", "x"), "s2", None),
        lambda: folders.is_public(TWO),
        lambda: folders.delete(TWO),
    ):
        with pytest.raises(Unavailable):
            unknown()
    folders.to_save(ONE, True, "r1")
    plain = CheckpointFolders(tmp_path / "a")
    saved(plain, TinkerPath("s1:train:0", "weights", "three"), b"third")
    away.clear()
    await mirroring.follow(folders.alignment, disk)
    with pytest.raises(Conflict):
        folders.to_save(TWO, False, "r1")
    assert (folders.existing(TWO) / "model.safetensors").read_bytes() == b"second"
    there = CheckpointFolders(tmp_path / "b", mirror_url=url)
    assert there.alignment.all() == 3


async def test_a_mistyped_bucket_is_refused_at_start(tmp_path: Path, s3: str):
    folders = CheckpointFolders(tmp_path / "a", mirror_url="s3://no-such-bucket/x")
    saved(CheckpointFolders(tmp_path / "a"), ONE, b"first")
    with pytest.raises(ConfigError, match=r"checkpoint_mirror cannot be written.*no-such-bucket"):
        await mirroring.begin(folders.alignment, Disk())


async def test_a_shard_waits_until_the_checkpoints_of_others_are_here(
    tmp_path: Path, away: list[str]
):
    url = (tmp_path / "there").as_uri()
    saved(CheckpointFolders(tmp_path / "other machine", mirror_url=url), ONE, b"first")
    own, all_of_it = (
        CheckpointFolders(tmp_path / "a", mirror_url=url, keeps=keeps)
        for keeps in (lambda name: not name.startswith("s1"), keeps_all)
    )
    disk = Disk()
    await mirroring.begin(own.alignment, disk)
    with pytest.raises(Unavailable, match="other shards have not fetched"):
        own.existing(ONE)
    following = asyncio.create_task(mirroring.follow(own.alignment, disk))
    await asyncio.sleep(0.2)
    assert not following.done()
    assert all_of_it.alignment.all() == 1
    await asyncio.wait_for(following, 10)
    assert own.existing(ONE)
