"""Little free space: a warning, then one key is refused, then all."""

import asyncio
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from skyrl_actors.config.limits import LimitsConfig
from skyrl_actors.controller import free_space
from skyrl_actors.controller.disk import Disk
from skyrl_actors.controller.free_space import FreeSpace, heaviest, level_of
from skyrl_actors.messages.catalog import CheckpointEntry
from skyrl_actors.messages.errors import CapacityError, Unavailable

ANN, BOB = "a" * 10, "b" * 10
LIMITS = LimitsConfig(low_free_bytes=300, scarce_free_bytes=200, full_free_bytes=100)
Usage = namedtuple("Usage", "free")


def checkpoint(owner: str, size: int) -> CheckpointEntry:
    return CheckpointEntry(
        run_id=f"s1k{owner}:train:0" if owner else "s1:train:0",
        kind="weights",
        name="one",
        time=1.0,
        num_bytes=size,
    )


CHECKPOINTS = [checkpoint(ANN, 5), checkpoint(BOB, 3), checkpoint(BOB, 3), checkpoint("", 99)]


@pytest.mark.parametrize(
    ("free", "level"), [(300, "ok"), (299, "low"), (199, "scarce"), (99, "full"), (0, "full")]
)
def test_the_level_follows_the_free_bytes(free: int, level: str):
    assert level_of(free, LIMITS) == level


def test_the_key_with_the_most_bytes_is_refused_first():
    assert heaviest(CHECKPOINTS) == BOB
    assert heaviest([checkpoint("", 99)]) == "" == heaviest([])


def space_with(free: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FreeSpace:
    made = FreeSpace({"journal": tmp_path / "journal"}, LIMITS, lambda: CHECKPOINTS)
    monkeypatch.setattr(free_space.shutil, "disk_usage", lambda _: Usage(free))
    made.take(made.read())
    return made


def refused(space: FreeSpace, owner: str) -> Any:
    try:
        space.check(owner)
    except (CapacityError, Unavailable) as error:
        return type(error)
    return None


@pytest.mark.parametrize(
    ("free", "of_ann", "of_bob", "of_anyone"),
    [
        (299, None, None, None),
        (199, None, CapacityError, None),
        (99, Unavailable, Unavailable, Unavailable),
    ],
)
def test_one_key_is_refused_before_all(
    free: int,
    of_ann: Any,
    of_bob: Any,
    of_anyone: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    space = space_with(free, monkeypatch, tmp_path)
    assert [refused(space, owner) for owner in (ANN, BOB, "")] == [of_ann, of_bob, of_anyone]
    is_full = free < 100
    assert (space.fault() is not None) == is_full
    if not is_full:
        assert "limits." in (space.warning() or "")
    assert space.status()["journal"]["free_bytes"] == free


def test_requests_are_accepted_again_when_there_is_space(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    space = space_with(50, monkeypatch, tmp_path)
    with pytest.raises(Unavailable, match=r"the disk of the journal .* nothing new is accepted"):
        space.check(ANN)
    monkeypatch.setattr(free_space.shutil, "disk_usage", lambda _: Usage(1000))
    space.take(space.read())
    assert refused(space, ANN) is None and space.warning() is None


async def test_an_error_does_not_end_the_watch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    looks = 0

    def usage(_: Path) -> Usage:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise OSError(5, "Input/output error")
        return Usage(50)

    monkeypatch.setattr(free_space.shutil, "disk_usage", usage)
    monkeypatch.setattr(free_space, "EVERY_S", 0.01)
    space = FreeSpace({"journal": tmp_path}, LIMITS, lambda: CHECKPOINTS)
    watching = asyncio.create_task(space.follow(Disk()))
    async with asyncio.timeout(5):
        while space.fault() is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    watching.cancel()
