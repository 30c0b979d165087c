"""A training rank with a JAX engine in its process.

The engine shares the arrays of the base model with the rank. It has a thread with an event loop of
its own. Samples come to it over RPC, and its other calls through the rank's actor.
"""

import asyncio
import gc
import threading
from typing import Any, ClassVar, cast

from ray.actor import ActorHandle

from skyrl_actors import remote
from skyrl_actors.engines.actor import EngineServer
from skyrl_actors.engines.interface import EngineSpec
from skyrl_actors.groups.worker_actor import TrainWorkerActor
from skyrl_actors.messages.errors import InternalError

STOP_S = 20.0


class RankWithEngine(TrainWorkerActor):
    """A training rank that can host one engine at a time."""

    # `watch` of the engine takes one thread, and each call another one.
    concurrency_groups: ClassVar = {**TrainWorkerActor.concurrency_groups, "engine": 16}
    hosted: "EngineThread | None" = None

    def host(self, spec: EngineSpec) -> None:
        """Make an engine that shares this rank's base, and end an earlier one.

        Call it after `setup`. Raises InternalError if the earlier one does not end.
        """
        from skyrl_actors.engines.jax_engine import JaxEngine

        if self.spec is None or not self.spec.hosts_engine:
            raise InternalError(f"{self!r} was not made to host an engine")
        earlier, self.hosted = self.hosted, None
        if earlier is not None:
            earlier.close()
        del earlier
        gc.collect()  # an engine is in circles of references, and its cache is large
        worker = cast(Any, self.worker)
        self.hosted = EngineThread(JaxEngine(spec, worker.model_factory.base))

    @remote.typed_ray.method(concurrency_group="engine")
    def engine(self, method: str, *arguments: Any) -> Any:
        """Call a method of the engine. Raises InternalError if this rank hosts none."""
        if self.hosted is None:
            raise InternalError(f"{self!r} hosts no engine")
        return self.hosted.call(method, *arguments)


class EngineThread:
    """The thread and the event loop of a hosted engine."""

    def __init__(self, engine: Any):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._thread.start()

        async def serve() -> EngineServer:
            return EngineServer(engine)

        self._server = asyncio.run_coroutine_threadsafe(serve(), self._loop).result()

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Run a method of the engine's server to its end. The caller's process has the deadline."""
        work = getattr(self._server, method)(*arguments)
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def close(self) -> None:
        """End the engine, and the calls that wait in it. Raises InternalError if it hangs."""
        try:
            self.call("stop", timeout_s=STOP_S)
        except TimeoutError:
            raise InternalError(f"an engine in this rank did not end within {STOP_S:g} s") from None
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)
        self._loop.close()


async def _cancel_others() -> None:
    """Cancel all other tasks of this loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class EngineInRank:
    """The handle of a hosted engine, with the methods of an engine actor's handle."""

    def __init__(self, rank: ActorHandle[Any]):
        self.rank = rank

    def __getattr__(self, name: str) -> "_Method":
        return _Method(self.rank, name)


class _Method:
    def __init__(self, rank: ActorHandle[Any], name: str):
        self._rank, self._name = rank, name

    def remote(self, *arguments: Any) -> Any:
        return cast(Any, self._rank).engine.remote(self._name, *arguments)
