"""Decide which base models are on the devices, and which are parked (pure).

A base model is on `disk` (no process has it), in `host` memory (its processes run, parked), or on
the `device`. Requests use a base model while it is on the device; others wait. The rules:

* Waiting base models come to the device in the order in which they began to wait.
* If there is no room, those leave that may: the longest unused ones first, then the ones that came
  first. One that is used stays for at least its turn. One that is not used stays for `idle_s`.
* One that leaves admits no further requests. It is parked when the last of its requests has ended,
  and stays if no other is wanted any more.
* With `max_loaded`, the parked one that was not used for the longest time goes to disk when another
  is loaded.

A turn lasts `min_residence_s`, or `TURN_PER_MOVE` times as long as its last moves took if that is
longer. So moves take a bounded part of the time.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

TURN_PER_MOVE = 10.0
Action = Literal["load", "wake", "park", "unload", "stay"]


class Place(StrEnum):
    """Where a base model is."""

    DISK = "disk"
    HOST = "host"
    DEVICE = "device"


AFTER: dict[Action, Place] = {
    "load": Place.DEVICE,
    "wake": Place.DEVICE,
    "park": Place.HOST,
    "unload": Place.DISK,
    "stay": Place.DEVICE,
}


@dataclass(frozen=True, slots=True)
class Step:
    """One move of one base model. One that was to leave may "stay", which moves nothing."""

    action: Action
    base: str


@dataclass(slots=True)
class BaseState:
    """One base model. Times are in seconds of the caller's clock."""

    name: str
    num_bytes: int  # on each device
    place: Place = Place.DISK
    users: int = 0  # requests that run
    waiting: int = 0
    waits_since: float = 0.0  # the oldest of those that wait
    came_at: float = 0.0  # on the device
    came_s: float = 0.0  # how long that took
    used_at: float = 0.0  # last
    is_leaving: bool = False
    rests_until: float = 0.0  # after a failed move
    move_s: dict[Action, float] = field(default_factory=dict[Action, float])  # the last of each

    @property
    def coming_s(self) -> float:
        """The seconds that its next way to the device takes, by its last one."""
        return self.move_s.get("load" if self.place is Place.DISK else "wake", 0.0)


class Residency:
    """The places of all base models. One step is carried out at a time.

    `capacity` is in bytes of one device; None means one base model at a time.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        capacity: int | None,
        *,
        min_residence_s: float,
        idle_s: float,
        max_loaded: int | None = None,
    ):
        self.bases = {name: BaseState(name, size) for name, size in sizes.items()}
        self._capacity = capacity
        self._min_residence_s = min_residence_s
        self._idle_s = idle_s
        self._max_loaded = max_loaded or len(self.bases)
        self.moving: Step | None = None

    def arrive(self, name: str, now: float) -> bool:
        """Count a request. Return whether it may run at once; otherwise it waits."""
        base = self.bases[name]
        if base.place is Place.DEVICE and not base.is_leaving and not self._moves(base):
            base.users += 1
            return True
        if not base.waiting:
            base.waits_since = now
        base.waiting += 1
        return False

    def leave(self, name: str, now: float) -> None:
        """Count the end of a request that ran."""
        base = self.bases[name]
        base.users -= 1
        base.used_at = now

    def give_up(self, name: str) -> None:
        """Count the end of a request that waited."""
        self.bases[name].waiting -= 1

    def next(self, now: float) -> Step | float | None:
        """Return the next step, or when to ask again, or None until a request arrives or leaves."""
        if self.moving is not None:
            return None
        waiting = [base for base in self._queue() if base.place is not Place.DEVICE]
        leaving = [base for base in self.bases.values() if base.is_leaving]
        if leaving and not waiting:
            return Step("stay", leaving[0].name)
        free = [base for base in leaving if not base.users]
        for base in free:
            if base.rests_until <= now:
                return Step("park", base.name)
        ready = [base for base in waiting if base.rests_until <= now]
        if ready:
            return self._way_for(ready[0], now)
        return min((base.rests_until for base in (*waiting, *free)), default=None)

    def begin(self, step: Step) -> None:
        self.moving = step

    def end(self, step: Step, now: float, seconds: float) -> int:
        """Record a step that was carried out. Return how many waiting requests may run now."""
        self.moving, base = None, self.bases[step.base]
        base.place, base.is_leaving = AFTER[step.action], False
        if step.action != "stay":
            base.move_s[step.action] = base.came_s = seconds
        if base.place is not Place.DEVICE:
            return 0
        return self._admitted(base, now)

    def fail(self, step: Step, now: float, pause_s: float) -> None:
        """Record a step that was not carried out; its base model rests for `pause_s`."""
        self.moving = None
        self.bases[step.base].rests_until = now + pause_s

    def set_place(self, name: str, place: Place) -> None:
        """Record where a base model is found."""
        self.bases[name].place = place

    def to_unload(self) -> Step | None:
        """Return the step that makes room for one more loaded base model, if there is none."""
        parked = [each for each in self.bases.values() if each.place is Place.HOST]
        if self._num_loaded < self._max_loaded or not parked:
            return None
        return Step("unload", min(parked, key=lambda b: b.used_at).name)

    @property
    def _num_loaded(self) -> int:
        return sum(base.place is not Place.DISK for base in self.bases.values())

    def turn_s(self, base: BaseState) -> float:
        """Return how long a used base model may stay while others wait."""
        moved_s = base.came_s + base.move_s.get("park", 0.0)
        return max(self._min_residence_s, TURN_PER_MOVE * moved_s)

    def wait_s(self, name: str, now: float) -> float:
        """Estimate the seconds until waiting requests of this base model run.

        Each one before it in the queue is assumed to use its whole turn.
        """
        base = self.bases[name]
        before = [other for other in self._queue() if other is not base]
        before = [other for other in before if other.waits_since <= base.waits_since]
        here = [each for each in self.bases.values() if each.place is Place.DEVICE]
        left = min((max(self._may_leave_at(each) - now, 0.0) for each in here), default=0.0)
        if self._has_room_for(base):
            left = 0.0
        return (
            left
            + sum(each.coming_s + self.turn_s(each) for each in before if each not in here)
            + base.coming_s
        )

    def _moves(self, base: BaseState) -> bool:
        return self.moving is not None and self.moving.base == base.name

    def _queue(self) -> list[BaseState]:
        return sorted(
            (base for base in self.bases.values() if base.waiting), key=lambda b: b.waits_since
        )

    def _admitted(self, base: BaseState, now: float) -> int:
        admitted, base.waiting = base.waiting, 0
        base.users += admitted
        base.came_at = base.used_at = now
        return admitted

    def _way_for(self, base: BaseState, now: float) -> Step | float | None:
        """Return the step that brings a base model nearer to the device."""
        if not self._has_room_for(base):
            return self._make_room_for(base, now)
        if base.place is Place.HOST:
            return Step("wake", base.name)
        if self._num_loaded < self._max_loaded:
            return Step("load", base.name)
        parked = [each for each in self.bases.values() if each.place is Place.HOST]
        if parked:
            least = min(parked, key=lambda b: (b.waiting > 0, b.used_at))
            return Step("unload", least.name) if least.rests_until <= now else least.rests_until
        return self._send_away(self._in_order_of_leaving()[:1], now)

    def _has_room_for(self, base: BaseState) -> bool:
        here = [each for each in self.bases.values() if each.place is Place.DEVICE]
        return self._fits([*here, base])

    def _fits(self, bases: Iterable[BaseState]) -> bool:
        held = list(bases)
        if self._capacity is None:
            return len(held) <= 1
        return len(held) <= 1 or sum(each.num_bytes for each in held) <= self._capacity

    def _make_room_for(self, base: BaseState, now: float) -> Step | float | None:
        """Send away as few base models as possible, in their order."""
        order = self._in_order_of_leaving()
        stay = list(order)
        leave: list[BaseState] = []
        while stay and not self._fits([*stay, base]):
            leave.append(stay.pop(0))
        return self._send_away(leave, now)

    def _send_away(self, leave: list[BaseState], now: float) -> Step | float | None:
        """Let base models leave whose time has come. Return the first step, or when to ask again.

        None of them leaves before all may, so that none is parked for nothing.
        """
        at = max((self._may_leave_at(each) for each in leave), default=now)
        if at > now:
            return at
        for each in leave:
            each.is_leaving = True
        free = sorted((each for each in leave if not each.users), key=lambda b: b.rests_until)
        if not free:
            return None
        return Step("park", free[0].name) if free[0].rests_until <= now else free[0].rests_until

    def _in_order_of_leaving(self) -> list[BaseState]:
        here = [each for each in self.bases.values() if each.place is Place.DEVICE]
        return sorted(
            here,
            key=lambda b: (not b.is_leaving, b.users > 0, b.came_at if b.users else b.used_at),
        )

    def _may_leave_at(self, base: BaseState) -> float:
        if base.is_leaving:
            return 0.0
        turn_ends = base.came_at + self.turn_s(base)
        return turn_ends if base.users else min(turn_ends, base.used_at + self._idle_s)
