"""Two data-parallel ranks (Ray actors, gloo) against one on ragged batches, and errors of ranks."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray.util.placement_group import get_placement_group

from placement.planner import plan
from placement.reserve import reserve
from placement.types import Demand, Node
from skyrl_actors import losses, remote
from skyrl_actors.config.cluster import ClusterConfig, EngineConfig
from skyrl_actors.config.groups import GroupConfig
from skyrl_actors.config.restart import RestartConfig
from skyrl_actors.config.strategies import DeepSpeedStrategy, Fsdp2Strategy
from skyrl_actors.groups.actor_group import ActorGroup
from skyrl_actors.groups.fan_out import Branches, FanOut, RelayActor
from skyrl_actors.groups.group_builder import GroupBuilder
from skyrl_actors.messages.columns import columns_from
from skyrl_actors.messages.errors import InternalError, InvalidRequest, StateLost
from skyrl_actors.messages.example import TARGETS, Example
from skyrl_actors.messages.model import AdamParams, LoraSpec, ModelSpec
from skyrl_actors.messages.precondition import OpPrecondition
from skyrl_actors.workers.interface import TrainWorker


@pytest.fixture(scope="module")
def local_ray():
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
    )
    yield
    ray.shutdown()


async def group_of(ranks: int, base: Path, name: str, **options: Any) -> ActorGroup:
    group_config = GroupConfig(num_ranks=ranks, microbatch_tokens=64, **options)
    config = ClusterConfig(
        name=name,
        policy=group_config,
        critic=None,
        engine=EngineConfig(num_engines=ranks),
        restart=RestartConfig(call_timeout_s=60),
    )
    made = plan(
        [[Demand(kind="policy", count=ranks, share=0.3)]],
        [Node(name="here", cpus=4, gpus=0)],
        "CPU",
    )
    reserved = await reserve(made, name, 30, print)
    builder = GroupBuilder(
        "policy",
        config,
        str(base),
        made,
        reserved,
        {"OMP_WAIT_POLICY": "passive"},
        1,
        detached=False,
    )
    group = await builder.make()
    await group.start()
    return group


def batch(seed: int, lengths: tuple[int, ...]):
    rng = np.random.default_rng(seed)
    return columns_from(
        [
            Example(
                rng.integers(0, 256, n).astype(np.int32),
                {
                    TARGETS: rng.integers(0, 256, n).astype(np.int32),
                    "logprobs": rng.normal(-5, 0.3, n).astype(np.float32),
                    "advantages": rng.normal(0, 1, n).astype(np.float32),
                },
            )
            for n in lengths
        ]
    )


RAGGED = ((3, 50, 7, 7, 31, 2, 90), (40,), (5, 5, 5))  # in the second, one rank gets no row


def relayed(group: ActorGroup) -> None:
    """Call each rank of the group through a relay of its own, as the ranks of a large group."""
    make: Any = ray.remote(num_cpus=0)(RelayActor)
    below = [Branches(actors=[actor], first=rank) for rank, actor in enumerate(group.actors)]
    relays = [make.remote(branches) for branches in below]
    group.fan_out = FanOut(group.names, Branches(actors=relays, height=1), relays)


@pytest.mark.slow
async def test_two_ranks_equal_one(local_ray, random_base: Path):
    """The two are called through relays."""
    one, two = await group_of(1, random_base, "one"), await group_of(2, random_base, "two")
    relayed(two)
    call = losses.find("ppo").checked({})
    for spec in (
        ModelSpec(model_id="lora", base_model="tiny", lora=LoraSpec(rank=8), seed=1),
        ModelSpec(model_id="full", base_model="tiny"),
    ):
        outputs = {}
        for group in (one, two):
            preconditions = (OpPrecondition(number, number - 1) for number in itertools.count(1))
            model_id = spec.model_id
            await group.apply(model_id, next(preconditions), TrainWorker.create_model, spec)
            seen = []
            for step in range(2):
                for k, lengths in enumerate(RAGGED):
                    seen.append(
                        await group.forward_backward(
                            model_id,
                            next(preconditions),
                            batch(10 * step + k, lengths),
                            call,
                            False,
                        )
                    )
                adam = AdamParams(learning_rate=1e-3, grad_clip_norm=10.0)
                seen += (
                    await group.apply(
                        model_id, next(preconditions), TrainWorker.optim_step, model_id, adam
                    )
                )[:1]
            seen.append(
                await group.forward_backward(
                    model_id, OpPrecondition(None, 9), batch(99, RAGGED[0]), call, True
                )
            )
            outputs[group] = seen
        for a, b in zip(outputs[one], outputs[two], strict=True):
            if isinstance(a, dict):
                assert a["skyrl.ai/grad_norm"] == pytest.approx(b["skyrl.ai/grad_norm"], rel=1e-5)
                continue
            np.testing.assert_allclose(
                a.fields["logprobs"], b.fields["logprobs"], rtol=1e-5, atol=2e-5
            )
            assert a.metrics["loss:sum"] == pytest.approx(b.metrics["loss:sum"], rel=1e-5, abs=1e-4)
            assert a.metrics["num_tokens:sum"] == b.metrics["num_tokens:sum"]
    ray.kill(two.fan_out.relays[1])
    with pytest.raises(remote.ActorDied, match=r"residents on policy\[1\]: the actor died"):
        await two.residents()


@pytest.mark.slow
async def test_sharded_weights_and_many_tenants_through_actors(
    local_ray, random_base: Path, tmp_path: Path
):
    """A base under FSDP2 for four tenants at once, and a full fine-tune under ZeRO.

    The full fine-tune is snapshotted and restored.
    """
    one = await group_of(1, random_base, "whole")
    two = await group_of(
        2,
        random_base,
        "sharded",
        strategy=Fsdp2Strategy(),
        full_strategy=DeepSpeedStrategy(stage=2),
    )
    call = losses.find("ppo").checked({})
    specs = [
        ModelSpec(model_id=f"t{i}", base_model="tiny", lora=LoraSpec(rank=4 + i), seed=i)
        for i in range(4)
    ] + [ModelSpec(model_id="full", base_model="tiny")]
    found = {}
    for group in (one, two):
        for spec in specs:
            await group.apply(spec.model_id, OpPrecondition(1), TrainWorker.create_model, spec)
        await asyncio.gather(
            *(
                group.forward_backward(
                    spec.model_id, OpPrecondition(2, 1), batch(i, (9, 30 + i, 5)), call, False
                )
                for i, spec in enumerate(specs)
            )
        )
        norms = [
            (
                await group.apply(
                    spec.model_id,
                    OpPrecondition(3, 2),
                    TrainWorker.optim_step,
                    spec.model_id,
                    AdamParams(learning_rate=1e-3),
                )
            )[0]["skyrl.ai/grad_norm"]
            for spec in specs
        ]
        answers = [
            await group.forward_backward(
                s.model_id, OpPrecondition(None, 3), batch(9, (9, 30, 5)), call, True
            )
            for s in specs
        ]
        found[group] = norms, [answer.fields["logprobs"] for answer in answers]
    assert found[two][0] == pytest.approx(found[one][0], rel=1e-5)
    for a, b in zip(found[one][1], found[two][1], strict=True):
        np.testing.assert_allclose(a, b, atol=5e-5)
    handles = await two.copy_state("full", OpPrecondition(None, 3))
    await two.write_state(handles, str(tmp_path))
    await one.apply("full", OpPrecondition(7), TrainWorker.restore_state, specs[-1], str(tmp_path))
    again = await one.forward_backward(
        "full", OpPrecondition(None, 7), batch(9, (9, 30, 5)), call, True
    )
    np.testing.assert_allclose(again.fields["logprobs"], found[two][1][-1], atol=5e-5)
    await two.forward_backward("full", OpPrecondition(4, 3), batch(3, (9, 4)), call, False)
    with pytest.raises(InternalError, match="copied between steps only"):
        await two.copy_state("full", OpPrecondition(None, 4))
    manifest = await two.export_weights(
        "full", OpPrecondition(None, 4), str(tmp_path / "flat"), "full@1", True
    )
    assert {entry.name for entry in manifest.tensors} == set(two_names(random_base))


def two_names(base: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(base / "model.safetensors", "pt") as file:
        return list(file.keys())


@pytest.mark.slow
async def test_errors_of_ranks_are_merged_into_one(local_ray, random_base: Path):
    two = await group_of(2, random_base, "errors")
    nothing = ModelSpec(
        model_id="m",
        base_model="tiny",
        lora=LoraSpec(rank=4, train_attn=False, train_mlp=False, train_unembed=False),
    )
    with pytest.raises(InvalidRequest, match="the LoRA spec trains nothing"):
        await two.apply("m", OpPrecondition(1), TrainWorker.create_model, nothing)
    with pytest.raises(
        StateLost, match=r"policy\[0\], policy\[1\]: this rank holds no complete state of nobody"
    ):
        await two.apply(
            "nobody", OpPrecondition(1, 0), TrainWorker.optim_step, "nobody", AdamParams()
        )
    doomed = psutil.Process(two.pids[1])
    doomed.kill()
    doomed.wait(10)
    with pytest.raises(StateLost, match=r"policy\[1\]: the actor died"):
        await two.apply(
            "m",
            OpPrecondition(1),
            TrainWorker.create_model,
            ModelSpec(model_id="m", base_model="tiny", lora=LoraSpec(rank=4)),
        )


async def test_a_placement_that_never_succeeds_is_reported_with_numbers(local_ray):
    from placement.types import DoesNotFit

    made = plan([[Demand(kind="policy", count=9)]], [Node(name="here", cpus=9, gpus=0)], "CPU")
    with pytest.raises(
        DoesNotFit, match=r"9 bundles .* were not placed within 1 s; .*CPU: .* free of 8"
    ):
        await reserve(made, "too-many", 1, print)
    with pytest.raises(ValueError, match="too-many"):  # nothing is held
        get_placement_group("too-many")
    gone = plan([[Demand(kind="policy", count=1)]], [Node(name="elsewhere", cpus=9, gpus=0)], "CPU")
    with pytest.raises(DoesNotFit, match="gone since the plan was made: elsewhere"):
        await reserve(gone, "on-a-lost-node", 1, print, pinned=True)
    with pytest.raises(ValueError, match="on-a-lost-node"):
        get_placement_group("on-a-lost-node")
