"""Base models alternate on the devices: rules, failures, and a simulation with random clients."""

import asyncio
import random
from collections import Counter

import pytest

from skyrl_actors.colocation.residence_lock import ResidenceLock
from skyrl_actors.colocation.residency import Place, Residency, Step
from skyrl_actors.messages.errors import ConfigError, InternalError
from tests.simulation.clock import SimLoop


def residency(
    sizes: dict[str, int],
    capacity: int | None = 1,
    max_loaded: int | None = None,
    residence_s: float = 10.0,
) -> Residency:
    return Residency(
        sizes, capacity, min_residence_s=residence_s, idle_s=2.0, max_loaded=max_loaded
    )


def carried_out(bases: Residency, step: Step, now: float, seconds: float = 0.0) -> int:
    """Check that this is the next step, and carry it out. Return how many requests it admits."""
    assert bases.next(now) == step
    bases.begin(step)
    assert bases.next(now) is None, "one step at a time"
    return bases.end(step, now, seconds)


def test_a_base_model_is_loaded_when_it_is_wanted_and_stays():
    bases = residency({"a": 1, "b": 1})
    assert bases.next(0.0) is None
    assert not bases.arrive("a", 0.0) and not bases.arrive("a", 0.5)
    assert carried_out(bases, Step("load", "a"), 0.5) == 2
    assert bases.arrive("a", 1.0)
    for _ in range(3):
        bases.leave("a", 2.0)
    assert bases.next(1000.0) is None, "an idle base model stays while nobody wants its place"


def test_a_used_base_model_has_its_turn_and_an_idle_one_leaves_early():
    bases = residency({"a": 1, "b": 1})
    bases.arrive("a", 0.0)
    carried_out(bases, Step("load", "a"), 0.0)
    bases.arrive("b", 1.0)
    assert bases.next(1.0) == 10.0, "the turn of a ends then"
    bases.leave("a", 3.0)
    assert bases.next(3.0) == 5.0, "without requests it leaves after idle_s"
    assert carried_out(bases, Step("park", "a"), 5.0) == 0
    assert carried_out(bases, Step("load", "b"), 5.0) == 1


def test_one_that_leaves_admits_no_more_and_is_parked_after_its_last_request():
    bases = residency({"a": 1, "b": 1})
    bases.arrive("a", 0.0)
    carried_out(bases, Step("load", "a"), 0.0)
    bases.arrive("b", 1.0)
    assert bases.next(10.0) is None, "a has a running request"
    assert not bases.arrive("a", 11.0)
    bases.leave("a", 12.0)
    carried_out(bases, Step("park", "a"), 12.0)
    carried_out(bases, Step("load", "b"), 12.0)
    bases.leave("b", 13.0)
    assert carried_out(bases, Step("park", "b"), 15.0) == 0
    assert carried_out(bases, Step("wake", "a"), 15.0) == 1


def test_one_that_was_to_leave_stays_if_no_other_is_wanted_any_more():
    bases = residency({"a": 1, "b": 1})
    bases.arrive("a", 0.0)
    carried_out(bases, Step("load", "a"), 0.0)
    bases.arrive("b", 1.0)
    assert bases.next(10.0) is None and not bases.arrive("a", 11.0)
    bases.give_up("b")
    assert carried_out(bases, Step("stay", "a"), 12.0) == 1
    assert bases.arrive("a", 13.0) and bases.next(1000.0) is None


def test_as_many_are_on_the_devices_as_fit():
    bases = residency({"a": 4, "b": 4, "c": 7}, capacity=8)
    for name in "ab":
        bases.arrive(name, 0.0)
        carried_out(bases, Step("load", name), 0.0)
    bases.arrive("c", 1.0)
    bases.leave("a", 1.0)
    assert bases.next(4.0) == 10.0, "a alone makes no room, so it is not parked before b may leave"
    bases.leave("b", 5.0)
    carried_out(bases, Step("park", "a"), 7.0)
    carried_out(bases, Step("park", "b"), 7.0)
    carried_out(bases, Step("load", "c"), 7.0)


def test_a_turn_is_longer_when_moves_take_long():
    bases = residency({"a": 1, "b": 1})
    bases.bases["a"].move_s.update({"wake": 3.0, "park": 2.0})
    bases.arrive("a", 0.0)
    carried_out(bases, Step("load", "a"), 0.0, 3.0)
    bases.arrive("b", 0.0)
    assert bases.next(1.0) == 50.0


def test_beyond_max_loaded_the_longest_unused_goes_to_disk():
    bases = residency({"a": 1, "b": 1, "c": 1}, max_loaded=2)
    now = 0.0
    for name, steps in (
        ("a", [Step("load", "a")]),
        ("b", [Step("park", "a"), Step("load", "b")]),
        ("c", [Step("park", "b"), Step("unload", "a"), Step("load", "c")]),
        ("a", [Step("park", "c"), Step("unload", "b"), Step("load", "a")]),
    ):
        now += 20.0
        bases.arrive(name, now)
        for step in steps:
            carried_out(bases, step, now)
        bases.leave(name, now)
        assert sum(base.place is not Place.DISK for base in bases.bases.values()) <= 2


def test_one_loaded_base_model_makes_room_for_the_next():
    bases = residency({"a": 1, "b": 1}, capacity=2, max_loaded=1)
    bases.arrive("a", 0.0)
    carried_out(bases, Step("load", "a"), 0.0)
    bases.leave("a", 0.0)
    bases.arrive("b", 5.0)
    for step in (Step("park", "a"), Step("unload", "a"), Step("load", "b")):
        carried_out(bases, step, 5.0)


def test_a_base_model_that_cannot_be_loaded_rests_and_others_go_on():
    bases = residency({"a": 1, "b": 1})
    bases.arrive("a", 0.0)
    bases.begin(Step("load", "a"))
    bases.fail(Step("load", "a"), 1.0, 4.0)
    assert bases.next(1.0) == 5.0
    bases.arrive("b", 2.0)
    carried_out(bases, Step("load", "b"), 2.0)


def test_the_estimate_counts_the_rest_of_a_turn_and_those_before():
    bases = residency({"a": 1, "b": 1, "c": 1})
    bases.arrive("a", 0.0)
    carried_out(bases, Step("load", "a"), 0.0)
    bases.bases["b"].move_s["load"] = 3.0
    bases.arrive("b", 1.0)
    bases.arrive("c", 2.0)
    assert bases.wait_s("b", 4.0) == 6.0 + 3.0
    assert bases.wait_s("c", 4.0) == 6.0 + 3.0 + 10.0


class Devices:
    """Carries out steps in virtual time, and checks what is where."""

    def __init__(self, seed: int, capacity: int, sizes: dict[str, int], failing: float = 0.0):
        self.chance = random.Random(seed)
        self.capacity, self.sizes, self.failing = capacity, sizes, failing
        self.here: set[str] = set()
        self.loaded: set[str] = set()
        self.most_loaded = 0
        self.moves = Counter[str]()

    async def carry(self, step: Step) -> None:
        seconds = {"load": 5.0, "wake": 1.0, "park": 1.0, "unload": 0.5}[step.action]
        await asyncio.sleep(seconds * self.chance.random())
        if self.chance.random() < self.failing:
            raise InternalError(f"{step.action} of {step.base} broke")
        self.moves[step.action] += 1
        if step.action in ("load", "wake"):
            assert (step.action == "load") == (step.base not in self.loaded)
            self.here.add(step.base)
            self.loaded.add(step.base)
        else:
            assert step.base in (self.here if step.action == "park" else self.loaded - self.here)
            (self.here if step.action == "park" else self.loaded).discard(step.base)
        self.most_loaded = max(self.most_loaded, len(self.loaded))
        assert sum(self.sizes[name] for name in self.here) <= self.capacity


def jain(values: list[float]) -> float:
    """Return Jain's index of fairness: 1 if all are equal, 1/n if one has everything."""
    return sum(values) ** 2 / (len(values) * sum(v * v for v in values))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("failing", [0.0, 0.2])
def test_random_clients_of_many_base_models_are_all_served(seed: int, failing: float):
    sizes = {"a": 2, "b": 2, "c": 3, "d": 1, "e": 4}
    loop = SimLoop(seed)
    try:
        loop.run_until_complete(asyncio.wait_for(_served(seed, sizes, failing), 20_000))
    finally:
        loop.close()


async def _served(seed: int, sizes: dict[str, int], failing: float) -> None:
    chance, devices = random.Random(seed), Devices(seed, 4, sizes, failing)
    bases = residency(sizes, capacity=4, max_loaded=3, residence_s=5.0)
    lock, done = ResidenceLock(bases, devices.carry, attempts=1000), Counter[str]()
    lock.open()

    async def client(name: str) -> None:
        for _ in range(20):
            await asyncio.sleep(chance.random() * 20)
            try:
                async with asyncio.timeout(chance.choice([1.0, 5000.0, 5000.0])):
                    async with lock.hold(name):
                        assert name in devices.here, "requests run on the devices only"
                        await asyncio.sleep(chance.random() * 3)
                        assert name in devices.here, "nothing leaves while a request runs"
            except TimeoutError:
                done["given up"] += 1
            else:
                done[name] += 1

    await asyncio.gather(*(client(name) for name in sizes for _ in range(4)))
    assert done.total() == 20 * 4 * len(sizes) and all(done[name] > 20 for name in sizes)
    assert devices.most_loaded <= 3
    for base in bases.bases.values():
        assert not base.users and not base.waiting
    await lock.close()


def test_base_models_under_load_get_equal_time_and_moves_take_a_tenth_of_it():
    sizes = dict.fromkeys("abcd", 1)
    loop = SimLoop(1)
    shares, moved_s = loop.run_until_complete(_shares(sizes))
    loop.close()
    assert jain(list(shares.values())) > 0.95
    assert moved_s < 0.15 * 20_000


async def _shares(sizes: dict[str, int]) -> tuple[dict[str, float], float]:
    devices = Devices(1, 1, sizes)
    lock = ResidenceLock(residency(sizes, residence_s=1.0), devices.carry, attempts=1)
    lock.open()
    shares = Counter[str]()
    loop = asyncio.get_running_loop()
    changes: list[float] = []

    async def client(name: str, work_s: float) -> None:
        while True:
            async with lock.hold(name):
                await asyncio.sleep(work_s)
                shares[name] += work_s / 8

    clients = [
        asyncio.create_task(client(name, 0.5 + 0.1 * number))
        for number, name in enumerate(sizes)
        for _ in range(8)
    ]
    while loop.time() < 20_000:
        await asyncio.sleep(1.0)
        changes.append(float(bool(lock.residency.moving)))
    for task in clients:
        task.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    await lock.close()
    return dict(shares), sum(changes)


async def test_a_failure_that_stays_reaches_those_who_wait_and_later_ones_try_again():
    broken = True

    async def carry(step: Step) -> None:
        if broken and step.base == "a":
            raise ConfigError("a does not fit")

    lock = ResidenceLock(residency({"a": 1, "b": 1}), carry, attempts=3)
    lock.open()
    with pytest.raises(ConfigError, match="does not fit"):
        async with lock.hold("a"):
            pass
    assert lock.fault("a") and lock.wait_s("a") is None
    async with lock.hold("b"):
        pass
    broken = False
    async with asyncio.timeout(20), lock.hold("a"):
        assert lock.fault("a") is None
    assert lock.status()["a"]["place"] == Place.DEVICE
    await lock.close()


async def test_a_request_that_gives_up_leaves_no_trace():
    moving = asyncio.Event()

    async def carry(step: Step) -> None:
        await moving.wait()

    lock = ResidenceLock(residency({"a": 1}), carry, attempts=1)
    lock.open()

    async def held() -> None:
        async with lock.hold("a"):
            await asyncio.sleep(60)

    tasks = [asyncio.create_task(held()) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.sleep(0)
    moving.set()
    tasks[1].cancel()  # admitted and cancelled in one turn of the loop
    await asyncio.sleep(0.01)
    base = lock.residency.bases["a"]
    assert (base.users, base.waiting) == (1, 0)
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert base.users == 0
    await lock.close()


def test_a_failed_park_is_tried_again_after_a_pause():
    bases = residency({"a": 1, "b": 1}, residence_s=0.0)
    bases.arrive("a", 0.0)
    carried_out(bases, Step("load", "a"), 0.0)
    bases.leave("a", 0.0)
    bases.arrive("b", 5.0)
    assert bases.next(5.0) == Step("park", "a")
    bases.begin(Step("park", "a"))
    bases.fail(Step("park", "a"), 5.0, 2.0)
    again = bases.next(5.0)
    assert again == 7.0
    assert bases.next(7.0) == Step("park", "a")
