"""An event loop with virtual time, in which a seed decides the order of ready callbacks."""

import asyncio
import random
import selectors
from collections.abc import Mapping
from typing import Any

END_S = 24 * 3600.0


class Stuck(Exception):
    """No callback or timer is left, or the time is over."""


class NoSelector(selectors.BaseSelector):
    """A selector without files. Instead of waiting, it moves the clock to the next timer."""

    def __init__(self, end_s: float | None = None) -> None:
        self.loop: Any = None  # the event loop, whose attribute `now` is its time
        self._end_s = end_s  # None: END_S

    def select(self, timeout: float | None = None) -> list[Any]:
        assert self.loop is not None
        if timeout is None:
            raise Stuck("nothing is ready and no timer runs")
        self.loop.now += timeout
        if self.loop.now > (END_S if self._end_s is None else self._end_s):
            raise Stuck("the time is over")
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> Any:
        return None

    def unregister(self, fileobj: Any) -> Any:
        return None

    def get_map(self) -> Mapping[Any, Any]:
        return {}

    def get_key(self, fileobj: Any) -> Any:
        raise KeyError(fileobj)


class SimLoop(asyncio.SelectorEventLoop):
    """An event loop with virtual time, and random order of ready callbacks."""

    def __init__(self, seed: int):
        selector = NoSelector()
        super().__init__(selector)
        selector.loop = self
        self.now = 0.0
        self.random = random.Random(seed)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        ready: Any = self._ready  # type: ignore[attr-defined]
        if len(ready) > 1 and self.random.random() < 0.5:
            handles = list(ready)
            self.random.shuffle(handles)
            ready.clear()
            ready.extend(handles)
        super()._run_once()  # type: ignore[misc]
