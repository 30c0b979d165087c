"""Checkpoint files: not accessed on the event loop, slow work in separate threads, and
listings that open only files of the owner.
"""

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from skyrl_actors.config.base_models import TinyBase
from skyrl_actors.config.cluster import ClusterConfig, JournalConfig
from skyrl_actors.controller import checkpoints
from skyrl_actors.controller.checkpoints import SPEC_FILE, CheckpointFolders
from skyrl_actors.controller.controller import Controller
from skyrl_actors.controller.disk import MOST_LISTINGS, THREADS, Disk, whose
from skyrl_actors.controller.owner_index import OwnerIndex
from skyrl_actors.controller.session_catalog import SessionCatalog
from skyrl_actors.controller.tenants import Sampler, TenantSession, TenantTable
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.catalog import CatalogVerb, SessionLabels, SessionNote
from skyrl_actors.messages.errors import CapacityError
from skyrl_actors.messages.model import LoraSpec, ModelSpec
from skyrl_actors.messages.paths import TinkerPath, parse_path
from skyrl_actors.messages.weights import SamplerWeights
from tests.fakes import FakeBackend

ANN, BOB = "aaaaaaaaaa", "bbbbbbbbbb"
WATCHED = (
    "open",
    "os.listdir",
    "os.scandir",
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.stat",
)


class Opened:
    """Record file accesses of this process below a folder, by thread, with an audit hook."""

    def __init__(self) -> None:
        self.root: str | None = None
        self.seen: list[tuple[int, str, str]] = []
        sys.addaudithook(self._record)

    def _record(self, event: str, arguments: tuple) -> None:
        if self.root is not None and event in WATCHED and arguments:
            path = os.fspath(arguments[0]) if isinstance(arguments[0], str | os.PathLike) else ""
            if isinstance(path, str) and path.startswith(self.root):
                self.seen.append((threading.get_ident(), event, path))

    @contextmanager
    def below(self, root: Path) -> Iterator[list[tuple[int, str, str]]]:
        self.seen, self.root = [], str(root)
        try:
            yield self.seen
        finally:
            self.root = None


OPENED = Opened()


def saved(folders: CheckpointFolders, owner: str, number: int, kind: str = "weights") -> TinkerPath:
    session = f"s{number:07x}0k{owner}"
    spec = ModelSpec(model_id=f"{session}:train:0", base_model="tiny", lora=LoraSpec(rank=4))
    folders.note_run(spec, session, {})
    path = TinkerPath(spec.model_id, kind, "one")  # type: ignore[arg-type]
    folder = folders.folder(path)
    folder.mkdir(parents=True)
    (folder / SPEC_FILE).write_text(json.dumps(asdict(spec)))
    (folder / "model.bin").write_bytes(b"x" * 100)
    folders.note(folder, {}, None)
    return path


@pytest.fixture
async def controller(tmp_path: Path):
    config = ClusterConfig(
        base_model=TinyBase(name="tiny"), checkpoint_dir=tmp_path / "checkpoints"
    )
    made = Controller(
        config, FakeBackend(), SqlJournal(JournalConfig(folder=tmp_path / "journal"), KINDS)
    )
    await made.start()
    yield made
    await made.close()


async def done(controller: Controller, request: rq.Request) -> rs.Result:
    result = await controller.answers.whole(await controller.submit(request), 20)
    assert result is not None and not isinstance(result, rs.Failure), result
    return result


async def test_no_checkpoint_file_is_touched_on_the_event_loop(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
):
    save = FakeBackend.save_checkpoint

    async def save_elsewhere(self, *arguments, **more) -> None:
        """Save in a thread, because the real ranks are other processes."""
        await asyncio.to_thread(lambda: asyncio.run(save(self, *arguments, **more)))

    monkeypatch.setattr(FakeBackend, "save_checkpoint", save_elsewhere)
    stat = os.stat

    def recorded(path, *arguments, **more):
        OPENED._record("os.stat", (path,))
        return stat(path, *arguments, **more)

    monkeypatch.setattr(os, "stat", recorded)  # the interpreter has no audit event for it
    root = controller.config.checkpoint_dir
    with OPENED.below(root) as seen:
        session = await controller.create_session(
            "s1", SessionLabels(user_metadata={"a": "b"}, display_name="name")
        )
        spec = ModelSpec(model_id="s1:train:0", base_model="tiny", lora=LoraSpec(rank=4))
        await done(controller, rq.CreateModel(spec=spec, session_id=session))
        await done(controller, rq.SaveWeights(model_id=spec.model_id, name="one"))
        await done(controller, rq.SaveWeights(model_id=spec.model_id, name="one", overwrite=True))
        await done(controller, rq.SaveForSampler(model_id=spec.model_id, name="two"))
        await done(controller, rq.SaveExternal(model_id=spec.model_id, name="three"))
        path = f"tinker://{spec.model_id}/weights/one"
        await done(
            controller, rq.LoadWeights(model_id=spec.model_id, path=path, with_optimizer=True)
        )
        await done(
            controller,
            rq.LoadWeights(
                model_id=spec.model_id, path=path, with_optimizer=False, mixed_with=path, share=0.5
            ),
        )
        other = ModelSpec(model_id="s1:train:1", base_model="tiny", lora=LoraSpec(rank=4))
        await done(controller, rq.CreateModel(spec=other, session_id=session, from_path=path))
        await controller.open_sampler(
            "s1:sample:9", session, "tiny", f"tinker://{spec.model_id}/sampler_weights/two"
        )
        assert (await controller.checkpoint_spec(parse_path(path))).model_id == spec.model_id
        assert (
            len(await controller.catalog("checkpoints")) == 3
            and len(await controller.session_catalog("sessions")) == 1
        )
        await controller.catalog(
            "copy", parse_path(path), TinkerPath("s1:train:7", "weights", "one"), session, None
        )
        await controller.catalog("set_public", parse_path(path), True)
        await controller.catalog("delete", parse_path(path))
        await controller.finish_session(session, "success")
    mine = threading.get_ident()
    assert len(seen) > 50
    assert [(event, path) for thread, event, path in seen if thread == mine] == []


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, list[str]]]:
    """Block copies until an event is set. Yields the event and the names of copied files."""
    go, copied = threading.Event(), list[str]()
    copyfile = checkpoints.shutil.copyfile

    def slow(source: Path, target: Path) -> None:
        copied.append(Path(source).name)
        assert go.wait(60)
        copyfile(source, target)

    monkeypatch.setattr(checkpoints.shutil, "copyfile", slow)
    yield go, copied
    go.set()


async def test_slow_copies_delay_no_listing_no_journal_read_and_no_session(
    controller: Controller, slow_copies
):
    go, _ = slow_copies
    folders = controller.folders
    source = await asyncio.to_thread(saved, folders, ANN, 1)
    mine = await asyncio.to_thread(saved, folders, BOB, 2)
    copies = [
        asyncio.ensure_future(
            controller.catalog(
                "copy", source, TinkerPath(f"s90k{ANN}:train:{i}", "weights", "one"), "s9", None
            )
        )
        for i in range(64)  # more than the threads of any pool
    ]
    try:
        async with asyncio.timeout(20):
            assert [c.run_id for c in await controller.catalog("checkpoints", BOB)] == [
                mine.model_id
            ]
            await controller.catalog("set_public", mine, True)
            assert await controller.catalog("is_public", mine)
            session = await controller.create_session()
            assert await controller.session_catalog("session", session)
            assert await controller.journal.operations("nobody", 0, 9) == []
            spec = ModelSpec(
                model_id=f"{session}:train:0", base_model="tiny", lora=LoraSpec(rank=4)
            )
            await done(controller, rq.CreateModel(spec=spec, session_id=session))
            await done(controller, rq.SaveWeights(model_id=spec.model_id, name="one"))
        assert not any(copy.done() for copy in copies)
    finally:
        go.set()
    await asyncio.gather(*copies)
    assert len(await controller.catalog("runs", ANN)) == 65


async def test_a_repeated_copy_waits_for_the_first_even_if_its_caller_was_cancelled(
    controller: Controller, slow_copies
):
    go, copied = slow_copies
    source = await asyncio.to_thread(saved, controller.folders, ANN, 1)
    arguments = (source, TinkerPath(f"s90k{ANN}:train:0", "weights", "one"), "s9", None)
    first = asyncio.ensure_future(controller.catalog("copy", *arguments))
    async with asyncio.timeout(20):
        while True:
            if copied:
                break
            await asyncio.sleep(0.01)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    repeats = [asyncio.ensure_future(controller.catalog("copy", *arguments)) for _ in range(8)]
    await asyncio.sleep(0.1)
    assert copied == ["model.bin"] and not any(repeat.done() for repeat in repeats)
    go.set()
    await asyncio.gather(*repeats)
    assert copied == ["model.bin"] and not controller._disk._locks._locks


async def test_concurrent_changes_of_a_checkpoint_are_all_kept(tmp_path: Path):
    folders, disk = CheckpointFolders(tmp_path), Disk()
    path = saved(folders, ANN, 1)
    for ttl in range(20):
        changes: tuple[tuple[CatalogVerb, bool | int], ...] = (
            ("set_public", True),
            ("set_ttl", 1000 + ttl),
            ("set_public", True),
            ("set_ttl", 1000 + ttl),
        )
        await asyncio.gather(*(disk.catalog(folders, verb, path, value) for verb, value in changes))
        (entry,) = folders.checkpoints()
        assert entry.public and entry.expires_at is not None
        folders.set_public(path, False)
        folders.set_ttl(path, None)


def test_a_listing_opens_only_files_of_the_owner(tmp_path: Path):
    folders = CheckpointFolders(tmp_path)
    catalog = SessionCatalog(TenantTable(), folders)
    for number in range(40):
        owner = ANN if number < 3 else f"{number:010x}"
        path = saved(folders, owner, number)
        catalog.opened(
            SessionNote(session_id=path.model_id.partition(":")[0], created_at=float(number))
        )
    hidden = saved(folders, BOB, 99)
    folders.set_public(hidden, True)
    with OPENED.below(tmp_path) as seen:
        assert (
            len(folders.runs(ANN))
            == len(folders.checkpoints(ANN))
            == len(catalog.sessions(ANN))
            == 3
        )
        assert catalog.session(f"s{1:07x}0k{ANN}").num_checkpoints == 1
    opened = [path for _, event, path in seen if event == "open"]
    assert 3 * 2 * 3 < len(opened) < 60 and all(f"k{ANN}" in path for path in opened)
    again = len(opened)
    for number in range(100, 140):
        saved(folders, BOB, number)
    with OPENED.below(tmp_path) as seen:
        assert (
            len(folders.runs(ANN))
            == len(folders.checkpoints(ANN))
            == len(catalog.sessions(ANN))
            == 3
        )
        assert catalog.session(f"s{1:07x}0k{ANN}").num_checkpoints == 1
    # The number does not depend on the number of files of others.
    assert len([path for _, event, path in seen if event == "open"]) == again
    assert {run.run_id for run in folders.runs(ANN, published=True)} == {
        r.run_id for r in folders.runs(ANN)
    } | {hidden.model_id}
    assert len(folders.runs()) == 81 and len(catalog.sessions()) == 81


def test_listing_published_checkpoints_opens_no_other_files_of_their_owners(tmp_path: Path):
    folders = CheckpointFolders(tmp_path)
    mine, theirs, other = saved(folders, ANN, 1), saved(folders, BOB, 2), saved(folders, BOB, 3)
    assert [run.run_id for run in folders.runs(ANN, published=True)] == [mine.model_id]
    folders.set_public(theirs, True)
    with OPENED.below(tmp_path) as seen:
        assert {run.run_id for run in folders.runs(ANN, published=True)} == {
            mine.model_id,
            theirs.model_id,
        }
    assert not [path for _, event, path in seen if event == "open" and "s00000030k" in path]
    folders.delete(theirs)
    assert [c.run_id for c in folders.checkpoints(ANN, published=True)] == [mine.model_id]
    reopened = CheckpointFolders(tmp_path)
    reopened.set_public(other, True)
    assert {c.run_id for c in reopened.checkpoints(ANN, published=True)} == {
        mine.model_id,
        other.model_id,
    }
    assert {c.run_id for c in CheckpointFolders(tmp_path).checkpoints(ANN, published=True)} == {
        mine.model_id,
        other.model_id,
    }


def test_an_owner_index_follows_added_and_removed_entries(tmp_path: Path):
    index = OwnerIndex(tmp_path / "later")
    assert index.names(ANN) == index.names(None) == []
    (tmp_path / "later").mkdir()
    for number in range(200):
        name = f"s{number:07x}0k{ANN if number % 2 else BOB}_train_0"
        (tmp_path / "later" / name).mkdir()
        assert name in index.names(ANN if number % 2 else BOB) and name not in index.names(
            BOB if number % 2 else ANN
        )
        if number % 3 == 0:
            (tmp_path / "later" / name).rmdir()
            assert name not in index.names(None) and name not in index.names(ANN)
    os.utime(tmp_path / "later", (1, 1))  # old enough that the index uses the modification time
    assert index.names(ANN) == index.names(ANN) and index._at_ns == 10**9
    (tmp_path / "later" / f"s00k{ANN}.json").touch()
    assert f"s00k{ANN}.json" in index.names(ANN)


async def test_listings_of_one_owner_delay_others_by_one_listing():
    disk, ended = Disk(), list[str]()

    async def listed(owner: str) -> None:
        await disk.listing(owner, time.sleep, 0.05)
        ended.append(owner)

    busy = [asyncio.create_task(listed("ann")) for _ in range(MOST_LISTINGS)]
    await asyncio.sleep(0.01)
    upkeep = asyncio.create_task(disk.run("upkeep", ended.append, "free space"))
    with pytest.raises(CapacityError, match="listings of this API key are open"):
        await disk.listing("ann", time.sleep, 0.05)
    await listed("bob")
    await upkeep
    assert ended.index("free space") <= 2 and ended.index("bob") <= 2 * THREADS["listings"] + 1
    await asyncio.gather(*busy)
    await listed("ann")


def test_a_listing_belongs_to_its_owner_or_to_the_owner_of_its_id():
    mark = "0123456789"
    assert [whose("sessions", asked) for asked in (None, mark)] == ["", mark]
    assert whose("runs", mark, True) == mark and whose("runs") == ""
    assert [whose("run", asked) for asked in (f"s1k{mark}:train:0", "s1:train:0")] == [mark, ""]


def test_a_listing_of_sessions_survives_samplers_that_open_meanwhile(tmp_path: Path):
    tenants, read = TenantTable(), list[str]()

    class Session(str):
        """An id whose comparison opens a sampler, as an event loop does beside this thread."""

        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            read.append(self)
            put(f"new{len(read)}", "s9")
            return str.__eq__(self, other)

    def put(sampler_id: str, session_id: str) -> None:
        weights = SamplerWeights(version="base", base_model="tiny")
        tenants.put_sampler(
            Sampler(
                sampler_id=sampler_id,
                base_model="tiny",
                model_path=None,
                weights=weights,
                session_id=session_id,
            )
        )

    for number in range(3):
        session_id = f"s{number}"
        tenants.sessions[session_id] = TenantSession(session_id, 0.0, {})
        for copy in range(2):
            put(f"{session_id}:sample:{copy}", Session(session_id))
    found = SessionCatalog(tenants, CheckpointFolders(tmp_path)).sessions()
    assert {len(entry.sampler_ids) for entry in found} == {2} and read
    assert len(read) < 20  # each sampler is looked at once
