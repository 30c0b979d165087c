import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_actors.colocation.in_flight import InFlight, in_sample_phase
from skyrl_actors.colocation.phase_lock import ColocatedPhaseLock
from skyrl_actors.colocation.phases import RESIDENT, MemoryPart, Move, Phase, plan_from, serves
from skyrl_actors.colocation.state_lock import StateLock
from skyrl_actors.messages.errors import InternalError, WeightsGone

PAIRS = list(itertools.product(Phase, Phase))
BYTES = {
    MemoryPart.TRAIN_WEIGHTS: 4,
    MemoryPart.GRADIENTS: 4,
    MemoryPart.OPTIMIZER: 8,
    MemoryPart.ENGINE_WEIGHTS: 4,
    MemoryPart.KV_CACHE: 16,
}


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_moves_between_any_two_phases_obey_the_rules(here: Phase, there: Phase):
    resident = set(RESIDENT[here])
    limit = max(sum(BYTES[p] for p in RESIDENT[here]), sum(BYTES[p] for p in RESIDENT[there]))
    touched = []
    for move in plan_from(RESIDENT[here], there):
        (resident.remove if move.action == "free" else resident.add)(move.part)
        touched.append(move.part)
        assert sum(BYTES[p] for p in resident) <= limit
        assert MemoryPart.OPTIMIZER not in resident or MemoryPart.TRAIN_WEIGHTS in resident
        assert MemoryPart.KV_CACHE not in resident or MemoryPart.ENGINE_WEIGHTS in resident
    assert resident == RESIDENT[there]
    assert len(set(touched)) == len(touched)
    assert set(touched) == RESIDENT[here] ^ RESIDENT[there]


def test_training_runs_while_the_optimizer_state_is_resident():
    assert serves(Phase.STEP, Phase.TRAIN)
    assert not serves(Phase.TRAIN, Phase.STEP)
    assert not serves(Phase.SAMPLE, Phase.IDLE)


class Recorder:
    def __init__(self) -> None:
        self.moves: list[str] = []

    async def move(self, move: Move, to: Phase) -> int:
        await asyncio.sleep(0)
        self.moves.append(str(move))
        return BYTES[move.part]

    def restart_now(self, move: Move, everything: bool, reason: str) -> None:
        raise AssertionError("nothing failed")


async def test_holders_of_one_phase_share_it_and_its_moves_happen_once():
    recorder = Recorder()
    phase_lock = ColocatedPhaseLock(recorder, Phase.TRAIN, timeout_s=1)
    inside, most = 0, 0

    async def work() -> None:
        nonlocal inside, most
        async with phase_lock.hold(Phase.SAMPLE):
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.01)
            inside -= 1

    await asyncio.gather(*(work() for _ in range(5)))
    assert most == 5
    (entered,) = phase_lock.timeline
    assert entered.phase == "SAMPLE" and [(name, size) for name, _, size in entered.moves] == [
        ("free gradients", 4),
        ("free train weights", 4),
        ("load engine weights", 4),
        ("load KV cache", 16),
    ]
    assert entered.seconds >= sum(seconds for _, seconds, _ in entered.moves)
    assert phase_lock.phase_seconds()["SAMPLE"] >= 0.01 and phase_lock.phase_seconds()["TRAIN"] >= 0
    assert recorder.moves == [
        "free gradients",
        "free train weights",
        "load engine weights",
        "load KV cache",
    ]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.booleans()), min_size=1, max_size=25
    )
)
def test_the_lock_never_mixes_states_and_serves_every_request(plan: list[tuple[str, int, bool]]):
    """Each entry: the wanted state, event-loop turns of work, and whether to cancel the request."""

    async def main() -> None:
        state, inside, served = "a", [], 0

        async def enter(old: str, new: str) -> None:
            nonlocal state
            assert not inside and old == state
            await asyncio.sleep(0)
            assert not inside
            state = new

        lock = StateLock("a", enter)

        async def work(wanted: str, turns: int) -> None:
            nonlocal served
            async with lock.hold(wanted):
                inside.append(wanted)
                try:
                    for _ in range(turns):
                        assert state == wanted and set(inside) == {wanted}
                        await asyncio.sleep(0)
                finally:
                    inside.remove(wanted)
            served += 1

        tasks = []
        for wanted, turns, cancel in plan:
            task = asyncio.create_task(work(wanted, turns))
            await asyncio.sleep(0)
            if cancel:
                task.cancel()
            tasks.append(task)
        async with asyncio.timeout(5):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        cancelled = sum(isinstance(r, asyncio.CancelledError) for r in results)
        assert not [r for r in results if isinstance(r, AssertionError)]
        assert served + cancelled == len(plan)
        assert lock.num_holders == 0 and lock.num_waiting == 0

    asyncio.run(main())


async def test_a_failed_change_fails_only_the_requests_for_that_state():
    async def enter(old: str, new: str) -> None:
        await asyncio.sleep(0)
        if new == "bad":
            raise InternalError("no such weights")
        if new == "gone":
            raise WeightsGone("nobody has them")

    lock = StateLock("a", enter, after_failure="nothing")

    async def hold(key: str) -> str:
        async with lock.hold(key):
            await asyncio.sleep(0)
            return lock.state

    results = await asyncio.gather(
        hold("a"), hold("bad"), hold("b"), hold("bad"), return_exceptions=True
    )
    assert results[0] == "a" and results[2] == "b"
    assert all(
        isinstance(r, InternalError) and "no such weights" in str(r)
        for r in (results[1], results[3])
    )
    assert await hold("a") == "a"
    with pytest.raises(WeightsGone, match="could not enter gone: nobody has them"):
        await hold("gone")
    assert lock.state == "a" and await hold("a") == "a"  # nothing was touched
    with pytest.raises(InternalError, match="no such weights"):
        await hold("bad")
    assert lock.state == "nothing"


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("drain", ["began", "ended", "TRAIN"]),
        ("keep", ["began", "TRAIN", "ended"]),
        ("abort", ["began", "TRAIN", "began", "ended"]),
    ],
)
async def test_a_running_sample_drains_freezes_or_aborts_before_training(
    policy: InFlight, order: list[str]
):
    phase_lock = ColocatedPhaseLock(Recorder(), Phase.SAMPLE, timeout_s=1)
    seen: list[str] = []
    awake, may_end = asyncio.Event(), asyncio.Event()

    async def run() -> str:
        seen.append("began")
        awake.set()
        await may_end.wait()
        seen.append("ended")
        return "tokens"

    async def train() -> None:
        async with phase_lock.hold(Phase.TRAIN):
            seen.append("TRAIN")

    sample = asyncio.create_task(in_sample_phase(phase_lock, policy, 0.01, run))
    await awake.wait()
    training = asyncio.create_task(train())
    if policy == "drain":
        asyncio.get_running_loop().call_later(0.05, may_end.set)
    await training
    may_end.set()
    assert await sample == "tokens"
    assert seen == order


@pytest.mark.parametrize("policy", ["drain", "keep", "abort"])
async def test_cancelling_a_sample_ends_it_under_every_policy(policy: InFlight):
    phase_lock = ColocatedPhaseLock(Recorder(), Phase.SAMPLE, timeout_s=1)
    ended = asyncio.Event()

    async def run() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            ended.set()

    sample = asyncio.create_task(in_sample_phase(phase_lock, policy, 0.0, run))
    await asyncio.sleep(0.01)
    sample.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sample
    assert ended.is_set()
    async with phase_lock.hold(Phase.TRAIN):
        pass


async def test_a_failed_sample_that_may_be_frozen_raises_its_own_error():
    phase_lock = ColocatedPhaseLock(Recorder(), Phase.SAMPLE, timeout_s=1)

    async def run() -> None:
        raise InternalError("the engine died")

    with pytest.raises(InternalError, match="the engine died"):
        await in_sample_phase(phase_lock, "keep", 1.0, run)
