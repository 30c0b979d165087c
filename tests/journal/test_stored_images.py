"""A journal stores each image once, gives it back, and removes it with its last request."""

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from skyrl_actors.config.cluster import JournalConfig
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal import tables
from skyrl_actors.journal.entries import Operation, SessionEnded, SessionOpened
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.journal.stored_images import ADD
from skyrl_actors.messages.columns import columns_from
from skyrl_actors.messages.errors import Corrupt, Unavailable
from skyrl_actors.messages.example import Example
from skyrl_actors.messages.images import Picture
from skyrl_actors.messages.model import LossCall, ModelSpec
from skyrl_actors.messages.requests import (
    CreateModel,
    ForwardBackward,
    Request,
    Sample,
    SamplingParams,
    Unload,
)
from tests.journal.test_sweeping import MODEL, NOW, OLD, done

LARGE = 100_000


def picture(name: str, place: int = 1) -> Picture:
    content = name.encode() * (LARGE // len(name))
    return Picture(place, hashlib.sha256(content).hexdigest(), content, (1, 4, 4), 2)


def sample(seq_id: int, *names: str) -> Sample:
    return Sample(
        sampler_id="s:sample:0",
        prompt=(1, 9, 9, 2),
        params=SamplingParams(max_tokens=4),
        seq_id=seq_id,
        pictures=tuple(picture(name) for name in names),
    )


def batch(*names: str) -> ForwardBackward:
    rows = [
        Example(np.arange(4, dtype=np.int32), {"weights": np.ones(4, np.float32)}, (picture(name),))
        for name in names
    ]
    return ForwardBackward(
        model_id=MODEL, columns=columns_from(rows), loss=LossCall("cross_entropy", {})
    )


async def opened(config: JournalConfig, retention_s: float = 50.0) -> SqlJournal:
    own = config.model_copy(update={"retention_s": retention_s})
    journal = SqlJournal(own, KINDS, lambda: NOW)
    await journal.open("x")
    if await journal.find("r1") is None:
        await journal.write(SessionOpened("s", {}, OLD))
    return journal


async def operation(journal: SqlJournal, number: int) -> Operation:
    found = await journal.find(f"r{number}")
    assert found is not None
    return found


async def contents(journal: SqlJournal, number: int) -> list[bytes]:
    request: Request = await journal.request(await operation(journal, number))
    if isinstance(request, Sample):
        return [one.content for one in request.pictures]
    assert isinstance(request, ForwardBackward) and request.columns.images is not None
    return list(request.columns.images.contents)


def stored_bytes(config: JournalConfig) -> int:
    return sum(file.stat().st_size for file in (config.folder / "packs").iterdir())


async def test_an_image_of_several_requests_is_stored_once(config: JournalConfig):
    journal = await opened(config)
    await journal.write(*done(1, sample(1, "a", "b", "a")), *done(2, batch("b", "c", "b")))
    await journal.write(*done(3, batch("a", "c")))
    await journal.close()
    journal = await opened(config)
    await journal.write(*done(4, sample(2, "c")))
    assert 3 * LARGE - 10 <= stored_bytes(config) < 3 * LARGE + 20_000
    a, b, c = (picture(name).content for name in "abc")
    assert [await contents(journal, number) for number in (1, 2, 3, 4)] == [
        [a, b, a],
        [b, c],
        [a, c],
        [c],
    ]
    read = await journal.request(await operation(journal, 2))
    assert isinstance(read, ForwardBackward) and read.columns.images is not None
    assert read.columns.images.starts.tolist() == [1, 5, 9]
    await journal.close()


async def test_an_image_is_removed_with_its_last_request(config: JournalConfig):
    journal = await opened(config)
    await journal.write(*done(1, sample(1, "a", "b")), *done(2, sample(2, "b", "c")))
    await journal.write(*done(3, sample(3, "b"), at=NOW), *done(4, sample(4, "d")))
    await journal.sweep()
    assert await journal.find("r1") is None and await journal.find("r4") is None
    assert await contents(journal, 3) == [picture("b").content]
    # a, c and d are of no request. The commit that brought b brought a and c too.
    assert stored_bytes(config) < 3 * LARGE + 5_000
    await journal.close()
    later = SqlJournal(config.model_copy(update={"retention_s": 1.0}), KINDS, lambda: NOW + 60)
    await later.open("x")
    await later.write(*done(5, sample(5, "a"), at=NOW + 60))  # an image that was removed before
    await later.sweep()
    assert await later.find("r3") is None and await contents(later, 5) == [picture("a").content]
    assert LARGE - 10 <= stored_bytes(config) < LARGE + 5_000
    await later.close()


async def test_a_damaged_image_is_detected(config: JournalConfig):
    journal = await opened(config)
    await journal.write(*done(1, sample(1, "a")))
    for file in (config.folder / "packs").iterdir():
        if file.stat().st_size > LARGE // 2:
            file.write_bytes(b"x" * LARGE)
    with pytest.raises(Corrupt, match="was changed"):
        await journal.request(await operation(journal, 1))
    await journal.close()


async def test_an_image_of_a_failed_write_is_stored_by_the_next_one(
    config: JournalConfig, monkeypatch: pytest.MonkeyPatch
):
    journal = await opened(config)

    def full(self: Any, pack: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("skyrl_actors.journal.packs.PackStore.write", full)
        with pytest.raises(Unavailable, match="no space left"):
            await journal.write(*done(1, sample(1, "a")))
    await journal.write(*done(1, sample(1, "a")))
    assert await contents(journal, 1) == [picture("a").content]
    await journal.close()


async def test_requests_of_older_versions_have_their_own_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    journal = await opened(JournalConfig(folder=tmp_path / "journal"))
    with monkeypatch.context() as patch:
        patch.setattr("skyrl_actors.journal.rows.without_images", lambda request: request)
        patch.setattr("skyrl_actors.journal.stored_images.images_in", lambda request: {})
        patch.setattr("skyrl_actors.journal.rows.images_in", lambda request: {})
        await journal.write(*done(1, batch("a", "b")))
    assert await contents(journal, 1) == [picture("a").content, picture("b").content]
    await journal.sweep()
    assert await journal.find("r1") is None and stored_bytes(journal.config) < 1000
    await journal.close()


async def test_an_image_whose_pack_was_removed_is_stored_again(config: JournalConfig):
    """As after the restore of an older copy of the database, which names the pack again."""
    journal = await opened(config)
    await journal.write(*done(1, sample(1, "a", "b")))
    for file in (config.folder / "packs").iterdir():
        if file.stat().st_size > LARGE:
            file.unlink()
    await journal.write(*done(2, sample(2, "a"), at=NOW))
    assert await contents(journal, 2) == [picture("a").content]
    with pytest.raises(Corrupt, match="is missing"):
        await contents(journal, 1)  # b is of no new request
    await journal.close()


async def test_a_commit_with_images_can_be_repeated(config: JournalConfig):
    """A failover can bring the row of an image back that a lost commit stores again."""
    journal = await opened(config)
    await journal.write(*done(1, sample(1, "a")))
    (row,) = await asyncio.to_thread(rows_of_images, journal)
    with journal.store.engine.begin() as connection:
        moved = {"digest": row.digest, "pack": "other", "start": 7, "length": LARGE, "users": 0}
        connection.execute(ADD, [moved])
    (again,) = await asyncio.to_thread(rows_of_images, journal)
    assert (again.pack, again.start, again.users) == ("other", 7, row.users)
    await journal.close()


def rows_of_images(journal: SqlJournal) -> list[Any]:
    with journal.store.engine.connect() as connection:
        return list(connection.execute(sa.select(tables.images)))


@pytest.mark.parametrize("is_unloaded", [True, False])
async def test_rows_with_many_images_are_removed_by_one_sweep(
    config: JournalConfig, is_unloaded: bool
):
    journal = await opened(config)
    spec = ModelSpec(model_id=MODEL, base_model="tiny")
    await journal.write(*done(1, CreateModel(spec=spec, session_id="s"), effect="applied"))
    for number in range(2, 5):
        images = batch(*(f"{number}.{image}" for image in range(120)))
        await journal.write(*done(number, images, effect="applied"))
    if is_unloaded:
        await journal.write(*done(5, Unload(MODEL)))
    await journal.write(SessionEnded("s", OLD))
    await journal.sweep()
    assert not [number for number in range(1, 6) if await journal.find(f"r{number}")]
    assert not list((journal.folder / "packs").iterdir())
    await journal.close()
