"""Groups of real ranks that die, hang, cannot start, or lose their machine."""

import asyncio
import logging
import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from placement.planner import plan
from placement.reserve import cluster_nodes, reserve
from placement.types import Demand, Node
from skyrl_actors.backends.offload import Offloader
from skyrl_actors.colocation.healing import MoveHealing
from skyrl_actors.colocation.phase_lock import ColocatedPhaseLock
from skyrl_actors.colocation.phases import Phase
from skyrl_actors.config.cluster import ClusterConfig, EngineConfig
from skyrl_actors.config.groups import GroupConfig
from skyrl_actors.config.restart import RestartConfig
from skyrl_actors.groups.actor_group import ActorGroup
from skyrl_actors.groups.group_builder import GroupBuilder
from skyrl_actors.groups.standby import Standby
from skyrl_actors.groups.supervisor import GroupSupervisor
from skyrl_actors.messages.errors import InternalError, StateLost
from skyrl_actors.messages.model import LoraSpec, ModelSpec
from skyrl_actors.messages.precondition import OpPrecondition
from skyrl_actors.remote import NAMESPACE
from skyrl_actors.workers.interface import TrainWorker
from tests.engines.test_pool import pool_of

SPEC = ModelSpec(model_id="m", base_model="tiny", lora=LoraSpec(rank=2))


@pytest.fixture(scope="module")
def cluster():
    made = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100 * 2**20}
    )
    ray.init(made.address, namespace=NAMESPACE, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


class Made:
    """A supervisor of one or more ranks in their own slots, with the messages that it reports."""

    def __init__(self, name: str, base: Path, ranks: int = 1, **restart):
        group = GroupConfig(num_ranks=ranks)
        self.config = ClusterConfig(
            name=name,
            policy=group,
            critic=None,
            engine=EngineConfig(num_engines=ranks),
            restart=RestartConfig.model_validate({"call_timeout_s": 60, **restart}),
        )
        self.base, self.ranks = base, ranks
        self.messages: list[str] = []
        self.came_up: list[str] = []
        self.standby: Standby | None = None
        self.supervisor: GroupSupervisor | None = None

    async def start(self, standby: bool = False) -> GroupSupervisor:
        planned = plan(
            [[Demand(kind="policy", count=self.ranks, share=1.0)]],
            [Node(name="here", cpus=9, gpus=0)],
            "CPU",
        )
        reserved = await reserve(planned, self.config.name, 30, self.messages.append)
        environment = {"OMP_WAIT_POLICY": "passive"}
        if standby:
            self.standby = Standby(
                self.config.name,
                str(self.base),
                reserved,
                0,
                environment,
                1,
                False,
                self.config.restart,
                self.messages.append,
                self.wait_until_settled,
            )
            self.standby.start_later()
        builder = GroupBuilder(
            "policy",
            self.config,
            str(self.base),
            planned,
            reserved,
            environment,
            1,
            detached=False,
            standby=self.standby,
        )
        self.supervisor = GroupSupervisor(
            builder, self.config.restart, self.messages.append, nullcontext, self.came_up.append
        )
        await self.supervisor.start()
        return self.supervisor

    async def wait_until_settled(self) -> None:
        assert self.supervisor is not None
        await self.supervisor.wait_until_settled()

    async def close(self) -> None:
        if self.supervisor is None:
            return
        await self.supervisor.close()
        if self.standby is not None:
            await self.standby.close()
        ray.util.remove_placement_group(ray.util.get_placement_group(self.config.name))


@pytest.fixture
async def make():
    """Create supervisors, and close them after the test, so that the next test finds free slots."""
    some: list[Made] = []

    def one(*args, **kwargs) -> Made:
        some.append(Made(*args, **kwargs))
        return some[-1]

    yield one
    for made in some:
        await made.close()


async def until(condition, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_dead_rank_is_detected_at_once_and_its_group_restarts(
    cluster, make, random_base: Path
):
    made = make("anew", random_base)
    supervisor = await made.start(standby=True)
    first = await supervisor.up()
    await first.apply("m", OpPrecondition(1), TrainWorker.create_model, SPEC)
    assert await first.residents() == {"m": 1}
    await until(lambda: made.standby is not None and made.standby.health == "HEALTHY", 60)
    os.kill(first.pids[0], signal.SIGKILL)
    with pytest.raises(StateLost):
        await supervisor.guarded(
            first.apply("m", OpPrecondition(2, 1), TrainWorker.drop_gradients, "m")
        )
    second = await supervisor.up()
    assert second is not first and second.pids != first.pids and await second.residents() == {}
    assert made.came_up == ["policy"] and supervisor.restarts == 1
    await until(lambda: made.standby is not None and made.standby.actor)
    assert made.standby is not None and made.standby.health == "STARTING"
    warming = made.standby.actor
    os.kill(second.pids[0], signal.SIGKILL)
    await until(lambda: supervisor.down is not None)
    # The standby process under way is used; a second one would slow down both.
    assert (await supervisor.up()).actors == [warming]


@pytest.mark.slow
async def test_a_group_that_cannot_move_its_memory_restarts_and_its_phase_is_entered(
    cluster, make, random_base: Path, monkeypatch: pytest.MonkeyPatch
):
    """A failed move is no rank death: three in a row succeed, although the limit is one restart."""
    made = make("moves", random_base, max_in_a_row=1)
    supervisor = await made.start()
    phase_lock = ColocatedPhaseLock(
        Offloader("gpu", [supervisor], pool_of(0)),
        Phase.TRAIN,
        60,
        MoveHealing(first_pause_s=0.1, longest_pause_s=0.2),
    )
    move, failures = ActorGroup.move, 3

    async def no_memory(self, parts, to):
        nonlocal failures
        if parts == ("optimizer",) and to == "device" and failures:
            failures -= 1
            raise InternalError("OutOfMemoryError: CUDA out of memory")
        return await move(self, parts, to)

    monkeypatch.setattr(ActorGroup, "move", no_memory)
    seen = {(await supervisor.up()).pids[0]}
    for _ in range(4):
        async with phase_lock.hold(Phase.STEP):  # callers see no error
            group = await asyncio.wait_for(supervisor.up(), 120)
            seen.add(group.pids[0])
            await group.apply("m", OpPrecondition(1), TrainWorker.create_model, SPEC)
        async with phase_lock.hold(Phase.SYNC):  # moves the optimizer state to the host
            pass
    assert len(seen) == 4 and supervisor.restarts == 3
    assert {name: f["total"] for name, f in phase_lock.failures.items()} == {
        "load optimizer state": 3
    }
    assert (
        phase_lock.fault() is None and phase_lock.failures["load optimizer state"]["in_a_row"] == 0
    )


@pytest.mark.slow
async def test_a_hanging_rank_is_reported_with_its_stacks(
    cluster, make, random_base: Path, caplog: pytest.LogCaptureFixture
):
    made = make("hangs", random_base, call_timeout_s=5)
    supervisor = await made.start()
    group = await supervisor.up()
    os.kill(group.pids[0], signal.SIGSTOP)
    with (
        caplog.at_level(logging.ERROR, "skyrl_actors"),
        pytest.raises(StateLost, match=r"no answer within 5 s from policy\[0\]"),
    ):
        await supervisor.guarded(
            group.apply("m", OpPrecondition(1), TrainWorker.create_model, SPEC)
        )
    text = caplog.text
    # py-spy read the stacks from outside.
    assert f"policy[0] (process {group.pids[0]})" in text and "main_loop" in text
    again = await supervisor.up()
    await again.apply("m", OpPrecondition(1), TrainWorker.create_model, SPEC)


@pytest.mark.slow
async def test_a_group_that_keeps_dying_is_given_up_with_its_log_tail(
    cluster, make, random_base: Path, tmp_path: Path
):
    gone = tmp_path / "base"
    gone.symlink_to(random_base)
    made = make("given-up", gone, max_in_a_row=2)
    supervisor = await made.start()
    gone.unlink()
    os.kill((await supervisor.up()).pids[0], signal.SIGKILL)
    await until(lambda: supervisor.down is not None)
    with pytest.raises(
        InternalError,
        match=r"(?s)the policy group keeps dying and was given up: .*last lines of policy\[0\]",
    ):
        await supervisor.up()
    with pytest.raises(InternalError, match="was given up"):  # at once, for every caller
        await asyncio.wait_for(supervisor.up(), 1)


@pytest.mark.slow
async def test_after_a_machine_dies_its_rank_restarts_elsewhere(
    cluster: Cluster, make, random_base: Path
):
    """Two slots: one on the head's raylet, one on the second."""
    second = cluster.add_node(num_cpus=1)
    # Nodes on one host are all listed.
    assert [node.cpus for node in cluster_nodes()] == [1, 1]
    made = make("nodes", random_base, ranks=2, start_timeout_s=120)
    supervisor = await made.start()
    group = await supervisor.up()
    await group.apply("m", OpPrecondition(1), TrainWorker.create_model, SPEC)
    cluster.remove_node(second, allow_graceful=False)
    await until(lambda: supervisor.down is not None)
    cluster.add_node(num_cpus=1)  # as an autoscaler would
    again = await asyncio.wait_for(supervisor.up(), 120)
    await again.apply("m", OpPrecondition(1), TrainWorker.create_model, SPEC)
    assert len(set(again.pids)) == 2
