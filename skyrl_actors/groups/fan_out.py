"""Calls to the ranks of a group: direct calls to few ranks, a tree of calls to many.

Above BRANCHES ranks, relays pass the calls on: each relay calls up to BRANCHES ranks, or relays of
its own. So the controller makes at most BRANCHES calls for one verb. All calls to a rank take the
same way, and each relay passes them on in the order in which they were submitted. Collectives need
this order.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skyrl_actors import remote
from skyrl_actors.groups.merging import merge_ranks

BRANCHES = 16
# A relay reports which ranks are late, so it may answer this much later than its ranks.
RELAY_GRACE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCall:
    """One call to some ranks: a method of their actor, and its arguments."""

    method: str
    ranks: Sequence[int]  # ascending
    common: tuple[Any, ...] = ()  # the first arguments, the same for all ranks
    own: Sequence[tuple[Any, ...]] | None = None  # the further arguments of each of these ranks
    timeout_s: float
    merges: bool = False  # relays merge the row outputs of their ranks

    def part(self, ranks: range) -> "RankCall":
        """Return the call to those of its ranks that are in `ranks`."""
        chosen = [i for i, rank in enumerate(self.ranks) if rank in ranks]
        own = None if self.own is None else [self.own[i] for i in chosen]
        return replace(self, ranks=[self.ranks[i] for i in chosen], own=own)


@dataclass(frozen=True, slots=True)
class Submitted:
    """A call that was started, and is awaited with `Branches.outcomes`."""

    refs: Sequence[ray.ObjectRef[Any]]  # one for each part
    parts: Sequence[RankCall]
    timeout_s: float


@dataclass(slots=True, kw_only=True)
class Branches:
    """Actors that are called here: the ranks from `first` on, or relays to `each` ranks each."""

    actors: Sequence[ActorHandle[Any]]
    first: int = 0
    each: int = 1
    height: int = 0  # relays between here and a rank
    calls: Counter[int] = field(default_factory=Counter[int])  # made so far, by place of the relay

    def submit(self, call: RankCall) -> Submitted:
        refs: list[ray.ObjectRef[Any]] = []
        parts: list[RankCall] = []
        for number, actor in enumerate(self.actors):
            start = self.first + number * self.each
            part = call.part(range(start, start + self.each))
            if not part.ranks:
                continue
            if self.height:
                refs.append(actor.relay.remote(self.calls[number], part))
                self.calls[number] += 1
            else:
                method = getattr(actor, call.method)
                refs.append(method.remote(*call.common, *(part.own[0] if part.own else ())))
            parts.append(part)
        return Submitted(refs, parts, call.timeout_s + self.height * RELAY_GRACE_S)

    async def outcomes(self, submitted: Submitted) -> list[Any]:
        """Return for each rank its result or its error."""
        found = await remote.outcomes(submitted.refs, submitted.timeout_s)
        if not self.height:
            return found
        return [
            outcome
            for part, of_relay in zip(submitted.parts, found, strict=True)
            for outcome in (
                [of_relay] * len(part.ranks) if isinstance(of_relay, BaseException) else of_relay
            )
        ]


class RelayActor:
    """Pass calls on to its branches in the order of their numbers.

    Ray may start the calls of an asynchronous actor in another order.
    """

    def __init__(self, branches: Branches):
        self._branches = branches
        self._next = 0
        self._advanced = asyncio.Condition()

    async def relay(self, number: int, call: RankCall) -> list[Any]:
        """Return for each rank its result or its error; with `merges`, merged into the first."""
        async with self._advanced:
            try:
                async with asyncio.timeout(call.timeout_s):
                    await self._advanced.wait_for(lambda: self._next == number)
            except TimeoutError:  # the group must restart, as after the death of a relay
                raise remote.ActorDied(f"a relay lost call {self._next}") from None
            try:
                submitted = self._branches.submit(call)
            finally:
                self._next += 1
                self._advanced.notify_all()
        found = await self._branches.outcomes(submitted)
        return merge_ranks(found) if call.merges else found


class FanOut:
    """The way to the ranks of a group. `relays` are the processes that exist for it."""

    def __init__(
        self,
        names: Sequence[str],
        branches: Branches,
        relays: Sequence[ActorHandle[Any]] = (),
    ):
        self._names = names
        self._branches = branches
        self.relays = relays

    def submit(self, call: RankCall) -> Submitted:
        """Start a call. Each rank begins its calls in the order of `submit`."""
        return self._branches.submit(call)

    async def results(self, submitted: Submitted, what: str) -> list[Any]:
        """Return the results in the order of the ranks.

        With `merges`, a result can include those of later ranks, which are None then. Errors of
        several ranks become one. A missed deadline raises Overdue with their names.
        """
        found = await self._branches.outcomes(submitted)
        names = [self._names[rank] for part in submitted.parts for rank in part.ranks]
        return remote.joined(found, names, what, submitted.timeout_s)


def tree_to(
    actors: Sequence[ActorHandle[Any]],
    make_relay: Callable[[Branches, int], ActorHandle[Any]],
) -> tuple[Branches, list[ActorHandle[Any]]]:
    """Return the way to these ranks, and the relays that it needs: none for few ranks.

    `make_relay` starts a relay beside a rank.
    """
    top, made = Branches(actors=actors), list[ActorHandle[Any]]()
    while len(top.actors) > BRANCHES:
        relays: list[ActorHandle[Any]] = []
        for start in range(0, len(top.actors), BRANCHES):
            first = start * top.each
            below = top.actors[start : start + BRANCHES]
            own = Branches(actors=below, first=first, each=top.each, height=top.height)
            relays.append(make_relay(own, first))
        top = Branches(actors=relays, each=top.each * BRANCHES, height=top.height + 1)
        made += relays
    return top, made


def relay_in(
    reserved: PlacementGroup, bundles: Sequence[int]
) -> Callable[[Branches, int], ActorHandle[Any]]:
    """Return what starts a relay in a rank's bundle of the placement group.

    Relays end with the process that started them.
    """
    make: Any = ray.remote(RelayActor)

    def start(branches: Branches, rank: int) -> ActorHandle[Any]:
        where = PlacementGroupSchedulingStrategy(
            reserved, placement_group_bundle_index=bundles[rank]
        )
        return make.options(num_cpus=0, scheduling_strategy=where).remote(branches)

    return start
