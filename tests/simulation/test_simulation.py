"""A few hundred seeds of the simulated service, and mutants that its checks must notice."""

import gc
from collections.abc import Iterator

import pytest

from skyrl_actors.colocation.phase_lock import ColocatedPhaseLock, MoveFailed
from skyrl_actors.colocation.residency import Residency
from skyrl_actors.colocation.state_lock import StateLock
from skyrl_actors.controller.ledger import Ledger
from skyrl_actors.controller.model_capacity import ModelCapacity
from skyrl_actors.controller.replay import Replayer
from skyrl_actors.controller.samples import Samples
from skyrl_actors.groups.exactly_once import Applied, ExactlyOnce
from skyrl_actors.messages.errors import InternalError
from tests.simulation import clock
from tests.simulation.backend import ParkableSim
from tests.simulation.world import run_many, run_seed

SEEDS = 150
MUTANT_SEEDS = 300
REPAIRED = ColocatedPhaseLock._healed
LONGEST_S = 250.0  # virtual time; without a mutant none of these seeds takes that long


@pytest.fixture(autouse=True, scope="module")
def light_heap() -> Iterator[None]:
    """Exclude objects of other tests from the garbage collection of each seed."""
    gc.freeze()
    yield
    # Collect the loops of mutants here: their finalizers disturb other code when they run later
    # (ast.parse of Python 3.11).
    gc.collect()
    gc.unfreeze()


def test_all_seeds_pass():
    assert run_many(range(SEEDS)) == []


def test_seeds_with_several_base_models_pass():
    assert run_many(range(SEEDS // 3), num_bases=3) == []


@pytest.mark.slow
def test_more_seeds_pass():
    assert run_many(range(SEEDS, 4 * SEEDS)) == []
    assert run_many(range(SEEDS, 3 * SEEDS), num_bases=2) == []


def test_seeds_kill_controllers_and_are_reproducible():
    crashes = [run_seed(seed) for seed in range(20)]
    assert sum(crashes) > 20  # fewer crashes would test nothing
    assert [run_seed(seed) for seed in range(20)] == crashes


def _applies_repeats(self, epoch, model_id, precondition, method, *args):
    """A rank that applies repeated operations again."""
    self.fence(epoch)
    if precondition.number is None:
        return getattr(self.worker, method)(*args)
    return self._apply(model_id, precondition.number, method, args)


def _accepts_any_state(self, model_id, precondition):
    """A rank that checks neither the epoch of the controller nor the state of the model."""
    self.fence = lambda epoch: None
    self._whole(model_id)


async def _answers_without_the_journal(self, op, outcome, step=None):
    """A ledger that shows answers without writing them."""
    del self.ops[op.request_id]
    self.queue.finish(op.request_id, op.model_id)
    self.results.resolve(op.request_id, outcome.result)


async def _replays_nothing(self, spec, operation, precondition):
    """A replayer that restores snapshots only."""


async def _rebuilds_no_weights(self, sampler):
    """Samples that do not rebuild lost weights of samplers."""
    return False


def _records_failed_operations(self, model_id, number, method, args):
    """A rank that records an operation as applied although it failed half-way."""
    result = None
    try:
        result = getattr(self.worker, method)(*args)
    finally:
        self._applied[model_id] = Applied(number=number, method=method, result=result)
    return result


def _repairs_nothing(self, move, reason):
    """A phase lock that retries a failed move without restarting its processes."""
    return MoveFailed(reason, self._healing.failed(str(move), reason).pause_s)


def _assumes_that_nothing_moved(self, move, reason):
    """A phase lock that restarts the processes and assumes the same resident parts as before."""
    before = self._resident
    failed = REPAIRED(self, move, reason)
    self._resident = before
    return failed


def _fails_all_waiters(self, wanted, error):
    """A state lock that does not retry."""
    self._changing = None
    for key, ticket in list(self._waiters):
        if key == wanted and not ticket.done():
            self._waiters.remove((key, ticket))
            ticket.set_exception(InternalError(f"could not enter {wanted}: {error}"))


def _grants_without_limit(self, kind):
    """A capacity without a limit."""
    return next(iter(self._present(kind)), None)


def _ignores_resident_models(self, able, residents):
    """A capacity that does not count present models after a start."""
    self._bases = able
    self._grant()


def _finds_room_always(self, bases):
    """A scheduler that brings a base model to full devices."""
    return True


def _admits_at_once(self, name, now):
    """A scheduler whose base models need not be on the devices."""
    self.bases[name].users += 1
    return True


async def _keeps_its_memory(self):
    """A parked base model whose memory stays on the devices."""


@pytest.mark.parametrize(
    ("cls", "name", "mutant"),
    [
        (Residency, "_fits", _finds_room_always),
        (Residency, "arrive", _admits_at_once),
        (ParkableSim, "park", _keeps_its_memory),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_every_mutant_of_several_base_models_is_noticed(
    monkeypatch: pytest.MonkeyPatch, cls: type, name: str, mutant
):
    monkeypatch.setattr(cls, name, mutant)
    monkeypatch.setattr(clock, "END_S", LONGEST_S)
    for seed in range(MUTANT_SEEDS):
        try:
            run_seed(seed, num_bases=3)
        except Exception:  # noqa: BLE001  any failure shows that the mutant was noticed
            return
    pytest.fail(f"{MUTANT_SEEDS} seeds did not notice it")


@pytest.mark.parametrize(
    ("cls", "name", "mutant"),
    [
        (ExactlyOnce, "apply", _applies_repeats),
        (ExactlyOnce, "_check_state", _accepts_any_state),
        (ExactlyOnce, "_apply", _records_failed_operations),
        (Ledger, "answer", _answers_without_the_journal),
        (Replayer, "_replay", _replays_nothing),
        (Samples, "_rebuilt_weights", _rebuilds_no_weights),
        (ColocatedPhaseLock, "_healed", _repairs_nothing),
        (ColocatedPhaseLock, "_healed", _assumes_that_nothing_moved),
        (StateLock, "_fail", _fails_all_waiters),
        (ModelCapacity, "_next", _grants_without_limit),
        (ModelCapacity, "begin", _ignores_resident_models),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_every_mutant_is_noticed(monkeypatch: pytest.MonkeyPatch, cls: type, name: str, mutant):
    monkeypatch.setattr(cls, name, mutant)
    monkeypatch.setattr(clock, "END_S", LONGEST_S)
    for seed in range(MUTANT_SEEDS):
        try:
            run_seed(seed)
        except Exception:  # noqa: BLE001  any failure shows that the mutant was noticed
            return
    pytest.fail(f"{MUTANT_SEEDS} seeds did not notice it")
