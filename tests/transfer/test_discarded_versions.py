"""Files of dropped versions are freed at once, or later if ranks restart; nobody waits for them."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_actors.messages.errors import InternalError, StateLost
from skyrl_actors.messages.weights import SamplerWeights, WeightManifest
from skyrl_actors.transfer import delivery as delivery_module
from skyrl_actors.transfer.delivery import Delivery
from skyrl_actors.transfer.files import FileTransfer
from skyrl_actors.transfer.object_store import ObjectStoreTransfer

FOLDER = Path("/weights")


class Ranks:
    """Ranks that record what they delete. `fault` is raised instead."""

    def __init__(self) -> None:
        self.deleted: list[str] = []
        self.fault: InternalError | None = None

    async def discard_export(self, path: str) -> None:
        if self.fault is not None:
            raise self.fault
        self.deleted.append(path)


def version(name: str, folder: Path = FOLDER) -> SamplerWeights:
    part = WeightManifest(version=name, kind="lora", path=f"{folder}/{name}", num_bytes=8)
    return SamplerWeights(version=name, parts=(part,))


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


@pytest.fixture
def group(ranks: Ranks) -> Any:
    """A supervisor whose restart takes for ever."""

    async def up() -> Any:
        await asyncio.Event().wait()

    return SimpleNamespace(group=ranks, down=None, name="the policy group", up=up)


async def test_files_of_a_version_are_freed_and_those_of_checkpoints_are_not(
    ranks: Ranks, group: Any
):
    delivery = Delivery(FileTransfer(FOLDER, False), group)
    await delivery.discard(version("v1"), [])
    for folder in ("/checkpoints", "/weights-of-runs", "/weight"):
        await delivery.discard(version("named", Path(folder)), [])
    assert ranks.deleted == ["/weights/v1"] and not delivery.unfreed("tiny")


async def test_a_version_that_is_dropped_while_ranks_restart_is_freed_with_a_later_one(
    ranks: Ranks, group: Any
):
    delivery = Delivery(FileTransfer(FOLDER, False), group)
    group.down = "a rank died"
    async with asyncio.timeout(5):
        await delivery.discard(version("v1"), [])
        group.group = None
        await delivery.discard(version("v2"), [])
    assert not ranks.deleted
    assert [one.version for one in delivery.unfreed("tiny")] == ["v1", "v2"]
    group.group, group.down = ranks, None
    await delivery.discard(version("v3"), [])
    assert not delivery.unfreed("tiny")
    assert ranks.deleted == ["/weights/v1", "/weights/v2", "/weights/v3"]


async def test_files_on_this_machine_are_freed_while_ranks_restart(
    ranks: Ranks, group: Any, tmp_path: Path
):
    delivery = Delivery(FileTransfer(tmp_path, False), group)
    (tmp_path / "adapter").mkdir()
    for name in ("adapter/weights", "full"):
        (tmp_path / name).write_text("weights")
    group.down = "a rank died"
    for name in ("adapter", "full", "never written"):
        await delivery.discard(version(name, tmp_path), [])
    assert not list(tmp_path.iterdir())


async def test_a_file_that_cannot_be_removed_here_is_left_for_the_ranks(
    ranks: Ranks, group: Any, monkeypatch: pytest.MonkeyPatch
):
    def fails(path: Path) -> None:
        raise OSError("no permission")

    monkeypatch.setattr(delivery_module, "remove", fails)
    delivery = Delivery(FileTransfer(FOLDER, False), group)
    group.down = "a rank died"
    await delivery.discard(version("v1"), [])
    group.down = None
    await delivery.discard(version("v2"), [])
    assert sorted(ranks.deleted) == ["/weights/v1", "/weights/v2"]


async def test_a_version_that_cannot_be_freed_delays_no_other(ranks: Ranks, group: Any):
    class Stuck(Ranks):
        async def discard_export(self, path: str) -> None:
            if path.endswith("stuck"):
                raise InternalError("no permission")
            await super().discard_export(path)

    group.group = stuck = Stuck()
    delivery = Delivery(FileTransfer(FOLDER, False), group)
    for name in ("stuck", "v1", "v2"):
        with pytest.raises(InternalError, match="no permission"):
            await delivery.discard(version(name), [])
    assert stuck.deleted == ["/weights/v1", "/weights/v2"]


async def test_a_version_whose_ranks_die_meanwhile_is_freed_later(ranks: Ranks, group: Any):
    delivery = Delivery(FileTransfer(FOLDER, False), group)
    ranks.fault = StateLost("a rank died")
    with pytest.raises(StateLost):
        await delivery.discard(version("v1"), [])
    ranks.fault = None
    await delivery.discard(version("v2"), [])
    assert sorted(ranks.deleted) == ["/weights/v1", "/weights/v2"]


async def test_versions_that_are_dropped_at_once_are_each_freed_once(ranks: Ranks, group: Any):
    class Slow(Ranks):
        async def discard_export(self, path: str) -> None:
            await asyncio.sleep(0.01)
            await super().discard_export(path)

    delivery = Delivery(FileTransfer(FOLDER, False), group)
    group.down = "a rank died"
    for number in range(3):
        await delivery.discard(version(f"left {number}"), [])
    group.group = slow = Slow()
    group.down = None
    dropping = [asyncio.create_task(delivery.discard(version(f"v{n}"), [])) for n in range(3)]
    await asyncio.sleep(0)
    assert len(delivery.unfreed("tiny")) == 6, "what is being freed may still be there"
    await asyncio.gather(*dropping)
    assert len(slow.deleted) == 6 == len(set(slow.deleted))
    assert not delivery.unfreed("tiny")


async def test_copies_of_an_engine_that_restarts_are_freed_when_it_is_back(
    ranks: Ranks, group: Any
):
    class Engine:
        managed = True

        def __init__(self) -> None:
            self.health, self.discarded = "HEALTHY", list[str]()
            self.actor = SimpleNamespace(discard=SimpleNamespace(remote=self._discard))

        def _discard(self, path: str) -> "asyncio.Future[None]":
            self.discarded.append(path)
            done = asyncio.get_running_loop().create_future()
            done.set_result(None)
            return done

    engines: Any = [Engine(), Engine()]
    delivery = Delivery(ObjectStoreTransfer(FOLDER, False), group)
    engines[1].health = "STARTING"
    await delivery.discard(version("v1"), engines)
    assert engines[0].discarded == ["/weights/v1"] and not engines[1].discarded
    assert [one.version for one in delivery.unfreed("tiny")] == ["v1"]
    engines[1].health = "HEALTHY"
    await delivery.discard(version("v2"), engines)
    assert engines[1].discarded == ["/weights/v1", "/weights/v2"]
    assert not delivery.unfreed("tiny")


async def test_what_a_late_delivery_wrote_is_freed_with_a_later_version(
    ranks: Ranks, group: Any, monkeypatch: pytest.MonkeyPatch
):
    """The last sample of a version was cancelled while its files were copied."""
    delivery, copied = Delivery(FileTransfer(FOLDER, False), group), asyncio.Event()
    monkeypatch.setattr(delivery.transfer, "needs_group", True, raising=False)
    monkeypatch.setattr(delivery.transfer, "shares", False, raising=False)

    async def deliver(*_: Any) -> list[None]:
        await copied.wait()
        return [None]

    monkeypatch.setattr(delivery.transfer, "deliver", deliver)
    (part,), engine = version("v1").parts, object()
    late = asyncio.ensure_future(
        delivery.deliver(part, engine, None, lambda: 1, 0.0)  # type: ignore[arg-type]
    )
    await asyncio.sleep(0)
    await delivery.discard(version("v1"), [])
    assert [one.version for one in delivery.unfreed("tiny")] == ["v1"]
    copied.set()
    await late
    await delivery.discard(version("v2"), [])
    assert ranks.deleted == ["/weights/v1", "/weights/v1", "/weights/v2"]
    assert not delivery.unfreed("tiny")
