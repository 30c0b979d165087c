"""Rounds: engines that load the same version at the same time share one delivery.

A version that is streamed or copied costs the trainers one gathering and one sending for each
delivery. An engine that asks for a version opens a round. The round starts when every engine that
may still ask has joined, or after a pause.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from skyrl_actors.messages.weights import WeightManifest, WeightStream
from skyrl_actors.transfer.transport import EngineTarget

Streams = Sequence[WeightStream | None]  # one for each engine of a delivery
Deliver = Callable[[WeightManifest, Sequence[EngineTarget]], Awaitable[Streams]]


@dataclass(slots=True, kw_only=True)
class Round:
    """The engines that share a delivery."""

    engines: list[EngineTarget] = field(default_factory=list[EngineTarget])
    joined: asyncio.Event = field(default_factory=asyncio.Event)
    delivery: asyncio.Task[Streams] | None = None


class Rounds:
    """The rounds that have not started yet, by the path of what they deliver."""

    def __init__(self, deliver: Deliver):
        self._deliver = deliver
        self._open: dict[str, Round] = {}

    async def join(
        self,
        manifest: WeightManifest,
        engine: EngineTarget,
        possible: Callable[[], int],
        pause_s: float,
    ) -> WeightStream | None:
        """Return what was delivered to this engine.

        `possible` returns how many engines may load the version now, with those that joined.
        `pause_s` of the first engine is the longest wait for them.
        """
        current = self._open.get(manifest.path)
        if current is None:
            current = self._open[manifest.path] = Round()
            run = self._run(manifest, current, possible, pause_s)
            current.delivery = asyncio.create_task(run)
            current.delivery.add_done_callback(_retrieve)
        assert current.delivery is not None
        place = len(current.engines)
        current.engines.append(engine)
        current.joined.set()
        return (await asyncio.shield(current.delivery))[place]

    async def _run(
        self,
        manifest: WeightManifest,
        current: Round,
        possible: Callable[[], int],
        pause_s: float,
    ) -> Streams:
        try:
            async with asyncio.timeout(pause_s):
                while len(current.engines) < possible():
                    current.joined.clear()
                    await current.joined.wait()
        except TimeoutError:
            pass  # later engines get a round of their own
        finally:
            del self._open[manifest.path]
        return await self._deliver(manifest, tuple(current.engines))


def _retrieve(delivery: asyncio.Task[Streams]) -> None:
    """Read the error, which every engine of the round gets, in case that all callers are gone."""
    if not delivery.cancelled():
        delivery.exception()
