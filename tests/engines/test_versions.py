import asyncio
from typing import Any

import pytest

from skyrl_actors.engines.interface import BASE_VERSION
from skyrl_actors.engines.versions import VersionTable, full_version, once
from skyrl_actors.messages.weights import SamplerWeights, WeightManifest

FIRST, SECOND, RESTARTED = ("engine[0]", 1), ("engine[1]", 1), ("engine[0]", 2)


def weights(version: str, kind: Any = "full") -> SamplerWeights:
    part = WeightManifest(version=version, kind=kind, path=f"/dev/shm/{version}", num_bytes=1)
    return SamplerWeights(version=version, parts=(part,))


def test_an_engine_needs_the_base_for_adapters_and_full_weights_otherwise():
    assert full_version(SamplerWeights(version="base")) == BASE_VERSION
    assert full_version(weights("m@1", "lora")) == BASE_VERSION
    assert full_version(weights("m@1")) == "m@1"


def test_a_version_in_use_is_needless_only_while_all_engines_hold_it():
    table = VersionTable()
    table["m@1"].loaded = table["m@2"].loaded = True
    assert table["m@3"].loaded is False
    with table.using(weights("m@1")):
        assert table.needless({"m@1", "m@2"}) == ("m@2",)
        assert table.needless({"m@1"}) == ("m@1", "m@2")
    assert table.needless({"m@2"}) == ("m@1", "m@2")


def test_a_sample_that_ends_after_its_version_was_dropped_leaves_nothing():
    table = VersionTable()
    table.register(weights("m@1"))
    with table.using(weights("m@1")):
        table.drop("m@1")
    assert table.needless(()) == () and FIRST not in table.deliveries_of("m@1")
    assert table["m@1"].uses == 0 and table["m@1"].parts == ()


async def test_work_runs_once_for_each_start_of_each_engine_and_again_after_a_failure():
    table, ran = VersionTable(), list[str]()
    deliveries = table["m@1"].deliveries

    async def deliver(fails: bool = False) -> None:
        await asyncio.sleep(0)
        ran.append("tried")
        if fails:
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        await once(deliveries, FIRST, lambda: deliver(fails=True))
    assert FIRST not in table.deliveries_of("m@1")
    await asyncio.gather(*(once(deliveries, FIRST, deliver) for _ in range(3)))
    assert len(ran) == 2 and FIRST in table.deliveries_of("m@1")
    assert not {SECOND, RESTARTED} & set(table.deliveries_of("m@1"))
    await once(deliveries, RESTARTED, deliver)
    assert len(ran) == 3


async def test_a_cancelled_caller_does_not_cancel_the_work_of_the_others():
    table, done = VersionTable(), asyncio.Event()

    async def check() -> None:
        await done.wait()

    first, second = (
        asyncio.ensure_future(once(table["m@1"].checks, FIRST, check)) for _ in range(2)
    )
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    done.set()
    await second
    assert FIRST in table["m@1"].checks
