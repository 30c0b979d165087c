"""Sample many sequences at once: places in a cache, filled again as sequences end.

The methods compute on the thread that calls them; `add` and `cancel` may be called by others.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import numpy as np

from skyrl_actors.jax_workers.adapter_slots import AdapterSlots, power_of
from skyrl_actors.jax_workers.decoder import Rows
from skyrl_actors.jax_workers.draws import Draw, Scores
from skyrl_actors.jax_workers.generation import (
    STEPS,
    Cache,
    Places,
    Prompts,
    Way,
    decode,
    empty_cache,
    forked,
    prefill,
)
from skyrl_actors.jax_workers.low_rank import Slots
from skyrl_actors.jax_workers.network import JaxNetwork
from skyrl_actors.jax_workers.plans import layout_of
from skyrl_actors.workers.blocks import Block

LEAST_SPAN = 64


class Generator:
    """Sample sequences with one base model and adapters."""

    def __init__(
        self, network: JaxNetwork, *, places: int, length: int, adapters: int, budget: int
    ):
        """At most `places` sequences of `length` tokens at once, of so many different adapters.

        Prompts of about `budget` tokens are computed in one pass.
        """
        self._network, self.places, self._length = network, places, length
        self._adapters, self._budget = adapters, budget
        self._cache: Cache | None = None
        self._waiting: deque[Draw] = deque()
        self._running: dict[int, Draw] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, draws: Iterable[Draw]) -> None:
        self._waiting.extend(draws)

    def free_cache(self) -> int:
        """Free the cache and return its bytes. No sequence may be running."""
        freed = sum(x.nbytes for x in self._cache) if self._cache else 0
        self._cache = None
        return freed

    def make_cache(self) -> int:
        """Allocate the cache, if there is none, and return its bytes."""
        if self._cache is not None:
            return 0
        network = self._network
        made = empty_cache(network.arch, self.places, self._length, network.base.embed.dtype)
        self._cache = Cache(*(jax.device_put(x, network.base.embed.sharding) for x in made))
        return sum(x.nbytes for x in self._cache)

    def step(self) -> list[Draw]:
        """Admit waiting sequences, draw a few tokens for each, and return those that grew."""
        for place in [p for p, draw in self._running.items() if draw.cancelled]:
            del self._running[place]
        self._fill(self._admit())
        return self._draw() if self._running else []

    def _admit(self) -> dict[int, Draw]:
        admitted: dict[int, Draw] = {}
        free = [place for place in range(self.places) if place not in self._running]
        adapters = {id(draw.adapter) for draw in self._running.values() if draw.adapter}
        while self._waiting and free:
            draw = self._waiting[0]
            if draw.cancelled:
                self._waiting.popleft()
                continue
            if draw.adapter and id(draw.adapter) not in adapters:
                if len(adapters) >= self._adapters:
                    break  # in turn: those behind it wait too
                adapters.add(id(draw.adapter))
            admitted[free.pop(0)] = self._waiting.popleft()
        self._running |= admitted
        return admitted

    def _fill(self, admitted: Mapping[int, Draw]) -> None:
        """Compute the prompts of these places, each prompt of a request once."""
        first: dict[str, int] = {}
        copies: list[tuple[int, int]] = []
        for place, draw in admitted.items():
            if draw.request in first and draw.scores == "none":
                copies.append((first[draw.request], place))
            else:
                first.setdefault(draw.request, place)
        copied = {place for _, place in copies}
        own = {p: draw for p, draw in admitted.items() if p not in copied and len(draw.prompt) > 1}
        for scores in ("none", "own", "dense"):
            left = [p for p, draw in own.items() if draw.scores == scores]
            while left:
                taken = _within(left, own, self._budget)
                left = left[len(taken) :]
                self._prefill({place: own[place] for place in taken}, scores)
        if copies:
            size = power_of(len(copies))
            pairs = np.full((2, size), self.places, np.int32)
            pairs[0] = 0
            pairs[:, : len(copies)] = np.asarray(copies, np.int32).T
            self._cache = _program(forked, 0)(self._cache, *pairs)

    def _prefill(self, draws: Mapping[int, Draw], scores: Scores) -> None:
        slots = AdapterSlots(self._network, draws.values())
        order = sorted(draws, key=lambda place: slots.number(draws[place]))
        lengths = [len(draws[place].prompt) - 1 for place in order]
        starts = np.cumsum([0, *lengths])
        blocks = [Block(int(s), 1, n) for s, n in zip(starts[:-1], lengths, strict=True)]
        numbers = [slots.number(draws[place]) for place in order]
        segments = [
            sum(n for n, number in zip(lengths, numbers, strict=True) if number == own)
            for own in dict.fromkeys(numbers)
        ]
        layout = layout_of(blocks, segments)
        tokens, targets, places = (np.zeros(layout.size, np.int32) for _ in range(3))
        places[:] = self.places
        prompts = [np.asarray(draws[place].prompt, np.int32) for place in order]
        tokens[layout.places] = np.concatenate([prompt[:-1] for prompt in prompts])
        targets[layout.places] = np.concatenate([prompt[1:] for prompt in prompts])
        places[layout.places] = np.repeat(np.asarray(order, np.int32), lengths)
        of_block = np.asarray(list(dict.fromkeys(numbers)), np.int32)[layout.of_block]
        rows, own = (Rows(layout.positions, layout.numbers), Slots(of_block, slots.scale))  # type: ignore[arg-type]
        given = Prompts(tokens, rows, own, places, targets)  # type: ignore[arg-type]
        run = _program(prefill, 2, self._network.arch, layout.window, scores)
        self._cache, found = run(self._network.base, slots.adapters, self._cache, given)
        if scores != "none":
            scored = np.asarray(found)[layout.places]
            for place, start, n in zip(order, starts[:-1], lengths, strict=True):
                draws[place].scored = scored[start : start + n]

    def _best(self, most: int) -> int:
        """Return for how many most likely tokens a program is made that returns so many."""
        return min(power_of(most), self._network.arch.vocab) if most else 0

    def _draw(self) -> list[Draw]:
        count = min(power_of(max(self._running) + 1, 4), self.places)
        slots = AdapterSlots(self._network, self._running.values())
        ints = {name: np.zeros(count, np.int32) for name in ("token", "position", "end", "top_k")}
        floats = {name: np.ones(count, np.float32) for name in ("temperature", "top_p")}
        of_block, key = np.zeros(count, np.int32), np.zeros((count, 2), np.uint32)
        for place, draw in self._running.items():
            ints["token"][place] = (draw.tokens or draw.prompt)[-1]
            ints["position"][place] = draw.position
            ints["end"][place] = len(draw.prompt) - 1 + draw.max_tokens
            ints["top_k"][place] = draw.top_k
            floats["temperature"][place], floats["top_p"][place] = draw.temperature, draw.top_p
            of_block[place] = slots.number(draw)
            key[place] = draw.seed >> 32 & 0xFFFFFFFF, draw.seed & 0xFFFFFFFF
        own = Slots(of_block, slots.scale)  # type: ignore[arg-type]  jax takes arrays of numpy
        places = Places(slots=own, key=key, **ints, **floats)  # type: ignore[arg-type]
        furthest = max(draw.position for draw in self._running.values()) + STEPS
        way = Way(
            span=min(power_of(furthest, 2, LEAST_SPAN), self._length),
            truncates=any(d.top_k > 0 or d.top_p < 1 for d in self._running.values()),
            best=self._best(max(draw.best for draw in self._running.values())),
        )
        run = _program(decode, 2, self._network.arch, way)
        self._cache, _, drawn = run(self._network.base, slots.adapters, self._cache, places)
        host = jax.tree.map(np.asarray, drawn)
        grown = list(self._running.items())
        for place, draw in grown:
            draw.take(place, host)
            if draw.stop_reason:
                del self._running[place]
        return [draw for _, draw in grown]


@cache
def _program(compute: Callable[..., Any], donated: int, *fixed: Any) -> Callable[..., Any]:
    """Return a compiled function of what follows these arguments; it reuses one's memory."""
    return jax.jit(partial(compute, *fixed), donate_argnums=donated)


def _within(places: Sequence[int], draws: Mapping[int, Draw], budget: int) -> list[int]:
    """Return the first places whose prompts have at most `budget` tokens, and at least one."""
    total, taken = 0, list[int]()
    for place in places:
        total += len(draws[place].prompt)
        if taken and total > budget:
            break
        taken.append(place)
    return taken
