"""Where a service reserves its slots, on a cluster whose devices differ."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from placement.types import Node, Plan
from skyrl_actors.backends import site
from skyrl_actors.config.load import load
from tests.conftest import ROOT

GIB, MIB = 2**30, 2**20
SHAPE = ROOT / "configs/shapes/qwen3-8b"


def node(name: str, mib: int) -> Node:
    return Node(
        name=name, cpus=96, gpus=8, device_bytes=mib * MIB, host_bytes=1000 * GIB, ray_id=name
    )


NODES = [node("large", 81559), node("small", 23034)]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Node]], None]:
    """Simulate Ray's cluster. The result sets what is free of `NODES`."""
    nodes = {True: NODES, False: NODES}

    async def ask(function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    def placed_on(plan: Plan, reserved: Any) -> Plan:
        return plan

    async def reserve(*_: Any) -> str:
        return "slots"

    monkeypatch.setattr(site, "ask", ask)
    monkeypatch.setattr(site, "cluster_nodes", lambda free=False: nodes[free])
    monkeypatch.setattr(site, "reserve", reserve)
    monkeypatch.setattr(site, "placed_on", placed_on)
    return lambda found: nodes.update({True: found})


async def reserved_nodes() -> set[str | None]:
    config = load(ROOT / "configs/colocated_1x8.yaml")
    found = await site.reserved_site(config, SHAPE, print, False)
    return {slot.node for slot in found.plan.slots}


async def test_slots_are_not_reserved_where_memory_does_not_suffice(
    free: Callable[[list[Node]], None],
):
    """Another program holds a device of the large node, and waiting for it is right."""
    assert await reserved_nodes() == {"large"}
    free([replace(NODES[0], gpus=7), NODES[1]])
    assert await reserved_nodes() == {"large"}
