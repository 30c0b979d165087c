"""Failed moves: which parts restart, which requests wait, and what an operator is advised."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_actors.colocation.healing import EVERYTHING_AT, LoadRetries, MoveHealing
from skyrl_actors.colocation.parts import PartMoves
from skyrl_actors.colocation.phase_lock import ColocatedPhaseLock
from skyrl_actors.colocation.phases import RESIDENT, MemoryPart, Move, Phase, plan_from
from skyrl_actors.colocation.state_lock import StateLock
from skyrl_actors.messages.errors import InternalError, StateLost, WeightsGone
from tests.simulation.clock import SimLoop

SUBSETS = [frozenset(some) for n in range(6) for some in itertools.combinations(MemoryPart, n)]


def in_virtual_time(work: Coroutine[Any, Any, None]) -> None:
    loop = SimLoop(0)
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(work)
    finally:
        asyncio.set_event_loop(None)
        loop.close()


async def until(condition: Callable[[], bool]) -> None:
    """Raises TimeoutError after two minutes."""
    async with asyncio.timeout(120):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


class Devices:
    """Refuse moves that do not fit the resident memory, and fail halfway on demand."""

    def __init__(self, failing: str, errors: list[BaseException | None]):
        self.resident = set(RESIDENT[Phase.TRAIN])
        self.failing = failing
        self.errors = errors  # of the failing move, in order; None: the move hangs
        self.torn: set[MemoryPart] = set()
        self.remade: list[tuple[str, bool, str]] = []
        self.tries = 0

    async def move(self, move: Move, to: Phase) -> int:
        await asyncio.sleep(0)
        assert move.part not in self.torn and (move.part in self.resident) == (
            move.action == "free"
        )
        if str(move) == self.failing:
            self.tries += 1
            if self.errors:
                self.torn.add(move.part)
                error = self.errors.pop(0)
                if error is None:
                    await asyncio.Event().wait()
                else:
                    raise error
        self._do(move)
        return 1

    def restart_now(self, move: Move, everything: bool, reason: str) -> None:
        self.remade.append((str(move), everything, reason))
        self.torn.clear()
        self._do(move)

    def _do(self, move: Move) -> None:
        (self.resident.add if move.action == "load" else self.resident.discard)(move.part)


FAULTS: list[tuple[BaseException | None, str]] = [
    (InternalError("out of memory"), "'load KV cache' failed: out of memory"),
    (StateLost("it died"), "'load KV cache' failed: it died"),
    (RuntimeError("no driver"), "'load KV cache' failed: no driver"),
    (asyncio.CancelledError(), "'load KV cache' was cancelled"),
    (None, "'load KV cache' took longer than 60 s"),
]


@pytest.mark.parametrize(("error", "text"), FAULTS, ids=lambda v: str(v)[:30])
def test_a_failed_move_is_retried_until_the_waiting_requests_are_served(
    error: BaseException | None, text: str
):
    devices = Devices("load KV cache", [error, error])
    phase_lock = ColocatedPhaseLock(devices, Phase.TRAIN, timeout_s=60)
    served = 0

    async def sample() -> None:
        nonlocal served
        async with phase_lock.hold(Phase.SAMPLE):
            assert devices.resident == RESIDENT[Phase.SAMPLE] and not devices.torn
            served += 1

    async def work() -> None:
        waiting = [asyncio.create_task(sample()) for _ in range(3)]
        await until(lambda: bool(devices.remade))
        assert phase_lock.phase == "HEALING" and text in str(phase_lock.fault())
        await asyncio.gather(*waiting)
        assert served == 3 and phase_lock.phase == "SAMPLE" and phase_lock.fault() is None
        assert devices.remade[0] == ("load KV cache", False, text)
        for _ in range(2):  # the second try fails, the third succeeds
            async with phase_lock.hold(Phase.STEP):
                assert devices.resident == RESIDENT[Phase.STEP]
            await sample()
        (failures,) = phase_lock.failures.values()
        assert failures == {"total": 2, "in_a_row": 0, "error": text}

    in_virtual_time(work())


def test_a_move_that_keeps_failing_is_retried_ever_more_rarely_and_other_phases_go_on():
    devices = Devices("load KV cache", [InternalError("out of memory") for _ in range(100_000)])
    phase_lock = ColocatedPhaseLock(
        devices,
        Phase.TRAIN,
        60,
        MoveHealing(first_pause_s=0.5, longest_pause_s=30.0, advise_after=5),
    )
    trained = 0

    async def work() -> None:
        nonlocal trained
        loop = asyncio.get_running_loop()

        async def sample() -> None:
            while loop.time() < 3600:
                async with phase_lock.hold(Phase.SAMPLE):
                    pass

        sampling = asyncio.create_task(sample())
        while loop.time() < 3600:
            async with phase_lock.hold(Phase.TRAIN):
                assert devices.resident == RESIDENT[Phase.TRAIN]
                trained += 1
                await asyncio.sleep(0.1)
        assert trained > 30_000  # only requests for the other phase wait
        assert 100 < devices.tries < 150
        assert [
            number for number, (_, everything, _) in enumerate(devices.remade, 1) if everything
        ] == [EVERYTHING_AT]
        fault = str(phase_lock.fault())
        assert f"'load KV cache' failed {devices.tries} times in a row" in fault
        assert "out of memory" in fault and "lower engine.kv_cache_bytes" in fault
        devices.errors.clear()  # memory was freed
        await sampling
        for phase in (Phase.TRAIN, Phase.SAMPLE):
            async with phase_lock.hold(phase):
                assert devices.resident == RESIDENT[phase]
        assert phase_lock.fault() is None

    in_virtual_time(work())


def test_a_holder_cancelled_during_a_move_does_not_block_the_others():
    devices = Devices("load KV cache", [None, InternalError("out of memory")])
    phase_lock = ColocatedPhaseLock(devices, Phase.TRAIN, timeout_s=60)

    async def hold(phase: Phase) -> str:
        async with phase_lock.hold(phase):
            return phase_lock.phase

    async def work() -> None:
        first, second = (
            asyncio.create_task(hold(Phase.SAMPLE)),
            asyncio.create_task(hold(Phase.SAMPLE)),
        )
        await until(lambda: bool(devices.torn))
        first.cancel()  # while the move hangs
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await hold(Phase.TRAIN) == "TRAIN"
        assert await second == "SAMPLE" and await hold(Phase.TRAIN) == "TRAIN"
        third = asyncio.create_task(hold(Phase.SAMPLE))
        await until(lambda: len(devices.remade) == 2)
        third.cancel()  # while its state is due for a retry
        with pytest.raises(asyncio.CancelledError):
            await third
        assert await hold(Phase.STEP) == "STEP" and await hold(Phase.SAMPLE) == "SAMPLE"

    in_virtual_time(work())


@pytest.mark.parametrize("wanted", list(Phase))
def test_every_phase_is_reached_from_any_state_that_a_failure_left(wanted: Phase):
    for here in SUBSETS:
        moves, resident = plan_from(here, wanted), set(here)
        for move in moves:
            assert (move.part in resident) == (move.action == "free")
            (resident.remove if move.action == "free" else resident.add)(move.part)
        assert resident == RESIDENT[wanted] and len({move.part for move in moves}) == len(moves)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.booleans()), min_size=1, max_size=25
    ),
    st.lists(st.booleans(), max_size=20),
)
def test_a_lock_whose_changes_fail_mixes_no_states_and_serves_every_request(
    plan: list[tuple[str, int, bool]], fails: list[bool]
):
    """Each entry: the wanted state, event-loop turns of work, and whether to cancel the request."""

    async def main() -> None:
        inside: list[str] = []
        served = 0
        coming = iter(fails)

        async def enter(old: str, new: str) -> None:
            assert not inside
            await asyncio.sleep(0)
            if next(coming, False):
                raise RuntimeError("half-way")

        lock = StateLock("a", enter, after_failure="", retry=lambda wanted, error: 0.001)

        async def work(wanted: str, turns: int) -> None:
            nonlocal served
            async with lock.hold(wanted):
                inside.append(wanted)
                for _ in range(turns):
                    assert set(inside) == {wanted} and lock.state == wanted
                    await asyncio.sleep(0)
                inside.remove(wanted)
            served += 1

        tasks = []
        for wanted, turns, cancel in plan:
            task = asyncio.create_task(work(wanted, turns))
            await asyncio.sleep(0)
            if cancel and inside.count(wanted) == 0:
                task.cancel()
            tasks.append(task)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        cancelled = sum(isinstance(r, asyncio.CancelledError) for r in results)
        assert not [r for r in results if isinstance(r, AssertionError)]
        assert served + cancelled == len(plan)
        assert lock.num_holders == 0 and lock.num_waiting == 0

    in_virtual_time(main())


def test_a_version_that_cannot_be_loaded_is_retried_while_others_are_served():
    retries = LoadRetries(first_pause_s=1.0, longest_pause_s=30.0, attempts=3)
    tries: list[str] = []
    errors = {"flaky": 1, "bad": 10**6}

    async def enter(old: str, new: str) -> None:
        tries.append(new)
        if errors.get(new, 0):
            errors[new] -= 1
            raise InternalError("the trainer did not answer")
        if new == "gone":
            raise WeightsGone("nobody has them")
        retries.succeeded(new)

    def retry(version: str, error: Exception) -> float | None:
        return None if isinstance(error, WeightsGone) else retries.failed(version)

    async def work() -> None:
        lock = StateLock("base", enter, after_failure="", retry=retry)

        async def hold(version: str) -> str:
            async with lock.hold(version):
                await asyncio.sleep(0)
                return lock.state

        flaky, bad = asyncio.create_task(hold("flaky")), asyncio.create_task(hold("bad"))
        await asyncio.sleep(0.01)
        assert await hold("base") == "base" and not flaky.done() and not bad.done()
        assert await flaky == "flaky"
        with pytest.raises(InternalError, match="could not enter bad: the trainer did not answer"):
            await bad
        assert tries.count("flaky") == 2 and tries.count("bad") == 3
        with pytest.raises(WeightsGone):
            await hold("gone")
        assert await hold("base") == "base"

    in_virtual_time(work())


def test_a_change_that_is_cancelled_from_inside_does_not_stop_the_lock():
    async def enter(old: str, new: str) -> None:
        if new == "b":
            raise asyncio.CancelledError  # as if a call inside was cancelled by other code

    async def work() -> None:
        lock = StateLock("a", enter)
        with pytest.raises(InternalError, match="could not enter b: it was cancelled"):
            async with lock.hold("b"):
                pass
        async with lock.hold("c"):
            assert lock.state == "c"

    in_virtual_time(work())


class OnePart:
    def __init__(self, name: str):
        self.name = name

    def restart_now(self, reason: str) -> None: ...


async def test_unfinished_parts_of_a_move_are_known_after_all_parts_ended():
    good, broken, dead, hangs = (OnePart(name) for name in ("good", "broken", "dead", "hangs"))
    moves, go = PartMoves(), asyncio.Event()

    async def work(part: OnePart) -> int:
        if part is broken:
            raise RuntimeError("out of memory")
        if part is dead:
            raise StateLost("it died")  # its own supervision restarts it
        await go.wait()
        return 7

    task = asyncio.create_task(moves.carry_out([good, broken, dead], work))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not task.done()  # the move waits for the other parts
    go.set()
    with pytest.raises(InternalError, match="broken: out of memory"):
        await task
    assert moves.unfinished == [broken]
    go.clear()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(moves.carry_out([dead, hangs], work), 0.01)
    assert moves.unfinished == [hangs]
    go.set()
    assert await moves.carry_out([good, dead], work) == 7 and not moves.unfinished
    assert await moves.carry_out([dead], work) is None and await moves.carry_out([], work) is None
