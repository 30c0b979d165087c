"""Which engine computes each streamed sample, for readers of its tokens so far."""

import asyncio

from skyrl_actors.engines.interface import EngineProcess
from skyrl_actors.engines.replica import EngineReplica
from skyrl_actors.messages.errors import StateLost
from skyrl_actors.messages.results import PartialSample

AFTER_LOSS_S = 0.2


class StreamedSamples:
    """Engine and attempt id of each streamed sample, by request id."""

    def __init__(self) -> None:
        self._places: dict[str, asyncio.Future[tuple[EngineReplica, str]]] = {}

    def record(self, attempt_id: str, engine: EngineReplica) -> None:
        """Record the engine of an attempt `<request id>.<number>`."""
        request_id = attempt_id.rpartition(".")[0]
        if request_id not in self._places or self._places[request_id].done():
            self._places[request_id] = asyncio.get_running_loop().create_future()
        self._places[request_id].set_result((engine, attempt_id))

    async def partial(self, request_id: str, have: int, timeout_s: float) -> PartialSample:
        """Return what came of a sample after its first `have` tokens.

        Returns as soon as there is any, or empty after `timeout_s`.
        """
        place = self._places.setdefault(request_id, asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(timeout_s):
                engine, attempt_id = await asyncio.shield(place)
                return await engine.ask(EngineProcess.partial, attempt_id, have, timeout_s)
        except TimeoutError:
            if not place.done():
                self._places.pop(request_id, None)
            return PartialSample()
        except StateLost:
            # Another engine repeats the sample with the same seed, so with the same tokens.
            await asyncio.sleep(AFTER_LOSS_S)
            return PartialSample()

    def end(self, request_id: str) -> None:
        self._places.pop(request_id, None)
