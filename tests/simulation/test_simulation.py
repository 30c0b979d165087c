"""A few hundred seeds of the simulated service, and the proof that a broken promise would be seen."""

import gc
from collections.abc import Iterator

import pytest

from skyrl_actors.colocation.gate import Gate
from skyrl_actors.colocation.keeper import MoveFailed, PhaseKeeper
from skyrl_actors.controller.lanes import Lanes
from skyrl_actors.controller.ledger import Ledger
from skyrl_actors.controller.recovery import Recovery
from skyrl_actors.controller.room import Room
from skyrl_actors.groups.exactly_once import Applied, ExactlyOnce
from skyrl_actors.messages.errors import InternalError
from tests.simulation import clock
from tests.simulation.world import run_many, run_seed

SEEDS = 300
MUTANT_SEEDS = 120
HEALED = PhaseKeeper._healed
LONGEST_S = 250.0  # virtual; none of these seeds takes so long when no promise is broken


@pytest.fixture(autouse=True, scope="module")
def light_heap() -> Iterator[None]:
    """What other tests left in memory need not be looked through for every seed."""
    gc.freeze()
    yield
    gc.collect()  # loops that mutants left half-way: their finalizers disturb what happens to run when they go (ast.parse of Python 3.11)
    gc.unfreeze()


def test_no_seed_breaks_a_promise():
    assert run_many(range(SEEDS)) == []


def test_seeds_kill_controllers_and_repeat_themselves():
    crashes = [run_seed(seed) for seed in range(20)]
    assert sum(crashes) > 20  # else nothing is tried
    assert [run_seed(seed) for seed in range(20)] == crashes


def _applies_again(self, epoch, model_id, turn, method, *args):
    """A rank that forgets what it did."""
    self.fence(epoch)
    if turn.number is None:
        return getattr(self.worker, method)(*args)
    return self._apply(model_id, turn.number, method, args)


def _any_state(self, model_id, turn):
    """A rank that does as told by whoever, to whatever it holds."""
    self.fence = lambda epoch: None
    self._whole(model_id)


async def _answers_before_it_is_written(self, op, outcome, step=None):
    del self.ops[op.request_id]
    self.queue.finish(op.request_id, op.line)
    self.results.resolve(op.request_id, outcome.result)


async def _leaves_out_the_replay(self, spec, operation, turn):
    pass


async def _lets_lost_weights_be(self, sampler):
    return False


def _torn_counts_as_whole(self, model_id, number, method, args):
    result = None
    try:
        result = getattr(self.worker, method)(*args)
    finally:
        self._applied[model_id] = Applied(number, method, result)
    return result


def _does_not_heal(self, move, reason):
    """A keeper that tries again and makes nothing anew."""
    return MoveFailed(reason, self._healing.failed(str(move), reason).pause_s)


def _believes_that_nothing_moved(self, move, reason):
    """What failed is made anew, and the keeper goes on from what it believed before."""
    before = self._resident
    failed = HEALED(self, move, reason)
    self._resident = before
    return failed


def _tells_who_waits(self, wanted, error):
    """A gate that does not try again."""
    self._changing = None
    for key, ticket in list(self._waiters):
        if key == wanted and not ticket.done():
            self._waiters.remove((key, ticket))
            ticket.set_exception(InternalError(f"could not enter {wanted}: {error}"))


def _gives_room_to_all(self, kind):
    return next(iter(self._present(kind)), None)


def _forgets_who_has_room(self, able, residents):
    self._able = able
    self._grant()


@pytest.mark.parametrize(
    ("cls", "name", "mutant"),
    [
        (ExactlyOnce, "apply", _applies_again),
        (ExactlyOnce, "_check_state", _any_state),
        (ExactlyOnce, "_apply", _torn_counts_as_whole),
        (Ledger, "answer", _answers_before_it_is_written),
        (Recovery, "_replay", _leaves_out_the_replay),
        (Lanes, "_frozen_again", _lets_lost_weights_be),
        (PhaseKeeper, "_healed", _does_not_heal),
        (PhaseKeeper, "_healed", _believes_that_nothing_moved),
        (Gate, "_fail", _tells_who_waits),
        (Room, "_next", _gives_room_to_all),
        (Room, "begin", _forgets_who_has_room),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_broken_promise_is_seen(monkeypatch: pytest.MonkeyPatch, cls: type, name: str, mutant):
    monkeypatch.setattr(cls, name, mutant)
    monkeypatch.setattr(clock, "END_S", LONGEST_S)
    for seed in range(MUTANT_SEEDS):
        try:
            run_seed(seed)
        except Exception:  # noqa: BLE001  whatever it was, it was seen
            return
    pytest.fail(f"{MUTANT_SEEDS} seeds did not notice it")
