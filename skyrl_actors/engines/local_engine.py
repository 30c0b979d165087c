"""One engine of the pool in an actor of this cluster.

The pool takes it over or starts it, watches it, and restarts it when the actor or vLLM's process
below it dies.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Concatenate

import ray
from ray.actor import ActorHandle

from skyrl_actors import remote
from skyrl_actors.colocation.healing import LoadRetries
from skyrl_actors.colocation.state_lock import StateLock
from skyrl_actors.config.engines import EngineConfig
from skyrl_actors.config.restart import RestartConfig
from skyrl_actors.engines.engine_site import EngineSite
from skyrl_actors.engines.interface import (
    BASE_VERSION,
    LIBRARIES,
    EngineCalls,
    EngineReport,
    EngineStatus,
)
from skyrl_actors.engines.replica import EngineReplica, P, R
from skyrl_actors.messages.errors import InternalError, PartDown, StateLost, UserError, WeightsGone
from skyrl_actors.supervision import backoff
from skyrl_actors.transfer.transport import EnginePlace
from skyrl_actors.transport.protocols import methods_of
from skyrl_actors.transport.rpc import Address, RpcClient

STATUS_TIMEOUT_S = 10.0
DROPPED = ""  # lock state of an engine without weights: no version
TAIL_LINES = 15
OVER_RPC = methods_of(EngineCalls)
Loader = Callable[["LocalEngine", str, StateLock[str]], Awaitable[None]]


class LocalEngine(EngineReplica):
    """An engine in an actor of this cluster. `load` brings a version of full weights into it."""

    def __init__(
        self,
        site: EngineSite,
        config: EngineConfig,
        restart: RestartConfig,
        epoch: int,
        load: Loader,
        report: Callable[[str], None],
        place: EnginePlace,
    ):
        super().__init__(site.spec.name, restart, report)
        self.site = site
        self.place = place
        self.config = config
        self.epoch = epoch
        self._load = load
        self._log_file = ""
        self._watching: asyncio.Task[None] | None = None
        self._rpc: RpcClient | None = None
        self._killed: ActorHandle[Any] | None = None  # the last actor killed after a failed move
        self.lock = self._new_lock(BASE_VERSION)

    def _new_lock(self, version: str) -> StateLock[str]:
        """Return a lock that loads a version on entry and retries failed loads.

        A load is retried if it fails before it touches the engine. A later failure ends the engine.
        """
        retries = LoadRetries(
            first_pause_s=backoff.BACKOFF_S,
            longest_pause_s=backoff.MAX_BACKOFF_S,
            attempts=self.restart.attempts,
        )

        async def enter(old: str, new: str) -> None:
            await self._load(self, new, lock)
            retries.succeeded(new)

        def retry(version: str, error: Exception) -> float | None:
            if isinstance(error, (StateLost, WeightsGone, UserError)) or self.lock is not lock:
                return None
            self._report(f"{self.name} was not given {version}: {error}")
            return retries.failed(version)

        lock = StateLock[str](version, enter, after_failure=DROPPED, retry=retry)
        return lock

    async def take_over(self, actors: remote.Actors) -> bool:
        """Attach to an earlier controller's engine if it runs and its spec equals the config's.

        The engine keeps the weights that it holds.
        """
        actor = self.site.find(actors)
        report = await self._adopt(actor) if actor else None
        if actor is None or report is None or report.status is None:
            return False
        self._report(f"took over {self.name}")
        self.actor, self._log_file, self._rpc = actor, report.log_file, self._rpc_to(actor)
        self.lock = self._new_lock(report.status.loaded_version or DROPPED)
        self._watch()
        self._step("started")
        self._step("ready")
        return True

    async def start(self) -> None:
        await remote.end_named(self.site.actor_names)
        await self._make()
        self._step("started")
        self._step("ready")

    async def _adopt(self, actor: ActorHandle[Any]) -> EngineReport | None:
        try:
            report = await self._ask([actor.adopt.remote(self.epoch)], "take over")
        except InternalError as error:
            self._report(f"{self.name} of an earlier controller cannot be taken over: {error}")
            return None
        return report if report.ready and remote.is_same(report.spec, self.site.spec) else None

    async def _make(self) -> None:
        await self.prepare()
        started = time.perf_counter()
        actor = await self.site.make()
        self.actor, self._rpc = actor, self._rpc_to(actor)
        report: EngineReport = await self._ask(
            [actor.adopt.remote(self.epoch)], "start", self.restart.start_timeout_s
        )
        self._log_file = report.log_file
        library = LIBRARIES[self.site.spec.type]
        self._report(
            f"{self.name}: {library} is imported ({time.perf_counter() - started:.1f} s), "
            "loading weights"
        )
        await self._ask([actor.start.remote(self.epoch)], "start", self.restart.start_timeout_s)
        self._report(f"{self.name}: ready ({time.perf_counter() - started:.1f} s)")
        self._watch()

    def _watch(self) -> None:
        assert self.actor is not None
        self._watching = asyncio.create_task(self._await_death(self.actor))

    async def _await_death(self, actor: ActorHandle[Any]) -> None:
        try:
            await remote.settled(actor.watch.remote())
        except InternalError as error:
            self.lost(actor, str(error))

    async def _ask(
        self, refs: list[ray.ObjectRef[Any]], what: str, timeout_s: float | None = None
    ) -> Any:
        return (
            await remote.gather(refs, [self.name], what, timeout_s or self.restart.call_timeout_s)
        )[0]

    async def ask(
        self,
        method: Callable[Concatenate[Any, P], Awaitable[R]],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> R:
        name = method.__name__
        actor, rpc = self.actor, self._rpc
        if actor is None or rpc is None or self.health in ("DEAD", "STARTING"):
            raise PartDown(f"{self.name} is {self.health}: {self.reason}")
        try:
            if name in OVER_RPC:
                return await self._call_rpc(actor, rpc, name, *arguments, **named)
            ref = getattr(actor, name).remote(self.epoch, *arguments, **named)
            try:
                return await self._ask([ref], name)
            except asyncio.CancelledError:
                remote.typed_ray.cancel(ref)
                raise
        except StateLost as error:
            self.lost(actor, str(error))
            if actor is self._killed:
                raise PartDown(f"{self.name} is restarting: {self.reason}") from None
            raise

    async def _call_rpc(
        self, actor: ActorHandle[Any], rpc: RpcClient, name: str, *arguments: Any, **named: Any
    ) -> Any:
        """Call the actor over its RPC connection.

        The engine itself applies a sample's deadline, because only it knows how long the sample
        waited for an adapter, or was frozen. A late sample must not end an engine that others use:
        here a status call checks that the engine still answers.
        """
        method = getattr(EngineCalls, name)
        call = asyncio.ensure_future(rpc.call(method, self.epoch, *arguments, **named))
        waits = 1 if name != "sample" else 2 if self.config.in_flight != "keep" else math.inf
        timeout_s = self.restart.call_timeout_s
        try:
            while not (await asyncio.wait((call,), timeout=timeout_s))[0]:
                waits -= 1
                if not waits:
                    raise remote.Overdue(
                        f"{name}: no answer within {timeout_s:g} s from {self.name}"
                    )
                await self._status_of(actor)
            return call.result()
        finally:
            if not call.cancel() and not call.cancelled():
                call.exception()  # retrieve the error: the caller was cancelled as the call ended

    def _rpc_to(self, actor: ActorHandle[Any]) -> RpcClient:
        async def find() -> Address:
            return await self._ask(
                [actor.get_rpc_address.remote(self.epoch, remote.node_address())], "line"
            )

        return RpcClient(find, EngineCalls)

    async def status(self) -> EngineStatus:
        if self.actor is None:
            raise PartDown(f"{self.name} is {self.health}: {self.reason}")
        return await self._status_of(self.actor)

    async def _status_of(self, actor: ActorHandle[Any]) -> EngineStatus:
        return await self._ask([actor.status.remote()], "status", STATUS_TIMEOUT_S)

    def lost(self, actor: ActorHandle[Any], reason: str) -> None:
        if actor is self.actor:
            if self._rpc is not None:
                self._rpc.hang_up()
            self.died(reason)

    def restart_now(self, reason: str) -> None:
        """Kill the actor so that its memory is free at once, then restart it."""
        if self.actor is not None and self.health != "DEAD":
            self._killed = self.actor
            if self._rpc is not None:
                self._rpc.hang_up()
            self.site.kill(self.actor)
        super().restart_now(reason)

    async def log_tail(self) -> str:
        return await asyncio.to_thread(_last_lines, self._log_file)

    async def _come_back(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await remote.end_named(self.site.actor_names)
        await self.site.available()
        self._step("again")
        # Before the new process, which callers that waited for the old one must not reach.
        self.actor, self._rpc, self.lock = None, None, self._new_lock(BASE_VERSION)
        self._begin_incarnation()
        try:
            await self._start_and_join()
        except InternalError as error:
            self.site.failed(str(error))
            raise

    async def _start_and_join(self) -> None:
        assert self.joining is not None
        started = time.perf_counter()
        if self.site.spec.device == "gpu":  # vLLM needs free device memory when it starts
            async with self.joining():
                await self._make()
                await self._join()
        else:
            await self._make()
            async with self.joining():
                await self._join()
        self._report(f"{self.name} runs again ({time.perf_counter() - started:.1f} s)")

    async def _join(self) -> None:
        self._check_alive("before it could join")  # it can die while it queues for its phase
        self._step("started")
        if self.wanted != self.lock.state:
            try:
                async with self.lock.hold(self.wanted):
                    pass
            except WeightsGone as error:  # only the version is gone; the next request rebuilds it
                self._report(f"{self.name} runs without weights: {error}")
        self._check_alive("while it joined")
        self._step("ready")

    def _check_alive(self, when: str) -> None:
        if self.health == "DEAD":
            raise StateLost(f"{self.name} died {when}: {self.reason}")

    async def detach(self) -> None:
        await super().detach()
        await remote.ended(self._watching)
        if self._rpc is not None:
            await self._rpc.close()

    async def close(self) -> None:
        await self.detach()
        await remote.end_named(self.site.actor_names)


def _last_lines(file: str) -> str:
    try:
        lines = Path(file).read_text(errors="replace").splitlines()[-TAIL_LINES:]
    except OSError:
        return ""
    return "\n".join([f"last lines of its log ({file}):", *lines])
