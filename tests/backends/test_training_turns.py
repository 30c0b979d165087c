"""On shared GPUs, policy and critic compute in turn; several models of a role run together."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from skyrl_actors.backends.ray_backend import RayBackend
from skyrl_actors.config.cluster import ClusterConfig, LoraConfig, PlacementConfig
from skyrl_actors.messages.model import LoraSpec, ModelSpec, Role
from skyrl_actors.messages.precondition import OpPrecondition

NO_ROWS: Any = None
ANY_STATE: Any = OpPrecondition


class Group:
    """A group that is up, and records which roles compute at the same time."""

    down = None

    def __init__(self, role: str, computing: list[str], seen: set[frozenset[str]]):
        self.role, self.computing, self.seen = role, computing, seen
        self.group = self

    async def guarded(self, work: Any) -> Any:
        return await work

    async def forward_backward(self, model_id: str, *_: Any) -> str:
        self.computing.append(self.role)
        self.seen.add(frozenset(self.computing))
        await asyncio.sleep(0.01)
        self.computing.remove(self.role)
        return model_id


def spec(role: Role, name: str) -> ModelSpec:
    return ModelSpec(model_id=name, base_model="tiny", role=role, lora=LoraSpec(rank=4))


@pytest.mark.parametrize(
    ("device", "layout", "together", "alone"),
    [
        ("gpu", "colocated", False, True),
        ("gpu", "colocated", True, False),
        ("gpu", "mixed", False, False),
        ("cpu", "colocated", False, False),
    ],
)
async def test_policy_and_critic_compute_in_turn_on_shared_gpus(
    device: Any, layout: Any, together: bool, alone: bool
):
    place = PlacementConfig(device=device, layout=layout, train_together=together)
    config = ClusterConfig(placement=place, lora=LoraConfig(max_full_models=0))
    backend = RayBackend(config, Path("/base"), print, False)
    computing, seen = list[str](), set[frozenset[str]]()
    backend.parts.groups = {role: Group(role, computing, seen) for role in ("policy", "critic")}  # type: ignore[dict-item]
    roles: list[Role] = ["policy", "policy", "critic", "policy", "critic"]
    calls = [
        backend.forward_backward(spec(role, f"m{i}"), ANY_STATE, NO_ROWS, None, False)
        for i, role in enumerate(roles)
    ]
    found = await asyncio.wait_for(asyncio.gather(*calls), 5)
    assert found == [f"m{i}" for i in range(5)]
    assert (frozenset({"policy", "critic"}) not in seen) == alone
    if alone:
        assert frozenset({"policy"}) in seen and frozenset({"critic"}) in seen
