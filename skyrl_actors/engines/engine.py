"""One engine of the pool, kept alive: taken over, started, watched, made anew when it or vLLM's process below it dies."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skyrl_actors import remote
from skyrl_actors.colocation.gate import Gate
from skyrl_actors.colocation.healing import LoadRetries
from skyrl_actors.config.cluster import RestartConfig
from skyrl_actors.config.engines import EngineConfig
from skyrl_actors.engines.interface import BASE_VERSION, ON_LINE, EngineReport, EngineSpec, EngineStatus
from skyrl_actors.engines.member import Member
from skyrl_actors.line import Address, Line
from skyrl_actors.messages.errors import InternalError, PartDown, StateLost, UserError, WeightsGone
from skyrl_actors.transfer.base import EnginePlace

VITALS_TIMEOUT_S = 10.0
DROPPED = ""  # state of an engine whose weights were dropped: no version
TAIL_LINES = 15
Loader = Callable[["Engine", str, Gate[str]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class EngineSite:
    """Where and how an engine's actor is made."""

    spec: EngineSpec
    name: str
    reserved: PlacementGroup
    bundle: int
    share: float
    on_gpu: bool  # it takes its share of one GPU itself; of several, its slots hold them for it
    environment: dict[str, str]
    detached: bool
    over_nodes: bool = False

    def make(self) -> ActorHandle:
        from skyrl_actors.engines.actor import EngineActor

        options: dict[str, Any] = {"lifetime": "detached"} if self.detached else {}
        actor_class = ray.remote(EngineActor).options(
            name=self.name,
            namespace=remote.NAMESPACE,
            num_cpus=self.share,
            num_gpus=self.share if self.on_gpu else 0,
            max_concurrency=10_000,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self.reserved, placement_group_bundle_index=self.bundle, placement_group_capture_child_tasks=self.over_nodes
            ),
            runtime_env={"env_vars": self.environment},
            **options,
        )
        return remote.make_named(actor_class, self.spec)


class Engine(Member):
    """An engine in an actor of this cluster. `load` brings a version of full weights into it."""

    def __init__(
        self, site: EngineSite, config: EngineConfig, restart: RestartConfig, epoch: int, load: Loader,
        say: Callable[[str], None], place: EnginePlace,
    ):  # fmt: skip
        super().__init__(site.spec.name, restart, say)
        self.site = site
        self.place = place
        self.config = config
        self.epoch = epoch
        self._load = load
        self._log_file = ""
        self._watching: asyncio.Task[None] | None = None
        self._line: Line | None = None
        self._remade: ActorHandle | None = None  # the last one that was ended because a move failed
        self.gate = self._new_gate(BASE_VERSION)

    def _new_gate(self, version: str) -> Gate[str]:
        """A load that fails before the engine was touched is tried again; what fails behind that ends the engine."""
        retries = LoadRetries(self.restart.backoff_s, self.restart.max_backoff_s, self.restart.attempts)

        async def enter(old: str, new: str) -> None:
            await self._load(self, new, gate)
            retries.succeeded(new)

        def retry(version: str, error: Exception) -> float | None:
            if isinstance(error, (StateLost, WeightsGone, UserError)):
                return None
            self._say(f"{self.name} was not given {version}: {error}")
            return retries.failed(version)

        gate = Gate[str](version, enter, after_failure=DROPPED, retry=retry)
        return gate

    async def take_over(self) -> bool:
        """The engine of an earlier controller, if it runs and is what the config asks for, with whatever weights it holds."""
        actor = remote.named(self.site.name)
        report = await self._taken_over(actor) if actor else None
        if actor is None or report is None or report.status is None:
            return False
        self._say(f"took over {self.name}")
        self.actor, self._log_file, self._line = actor, report.log_file, self._line_to(actor)
        self.gate = self._new_gate(report.status.loaded_version or DROPPED)
        self._watch()
        self._step("started")
        self._step("ready")
        return True

    async def start(self) -> None:
        await remote.end_named([self.site.name])
        await self._make()
        self._step("started")
        self._step("ready")

    async def _taken_over(self, actor: ActorHandle) -> EngineReport | None:
        try:
            report = await self._ask([actor.adopt.remote(self.epoch)], "take over")
        except InternalError as error:
            self._say(f"{self.name} of an earlier controller can not be taken over: {error}")
            return None
        return report if report.ready and report.spec == self.site.spec else None

    async def _make(self) -> None:
        started = time.perf_counter()
        actor = self.site.make()
        self.actor, self._line = actor, self._line_to(actor)
        report: EngineReport = await self._ask([actor.adopt.remote(self.epoch)], "start", self.config.start_timeout_s)
        self._log_file = report.log_file
        self._say(f"{self.name}: vLLM is imported ({time.perf_counter() - started:.1f} s), loading weights")
        await self._ask([actor.start.remote(self.epoch)], "start", self.config.start_timeout_s)
        self._say(f"{self.name}: ready ({time.perf_counter() - started:.1f} s)")
        self.gate = self._new_gate(BASE_VERSION)
        self.delivered, self.agreed = {}, {}
        self._watch()

    def _watch(self) -> None:
        assert self.actor is not None
        self._watching = asyncio.create_task(self._await_death(self.actor))

    async def _await_death(self, actor: ActorHandle) -> None:
        try:
            await remote.settled(actor.watch.remote())
        except InternalError as error:
            self.lost(actor, str(error))

    async def _ask(self, refs: list[ray.ObjectRef], what: str, timeout_s: float | None = None) -> Any:
        return (await remote.gather(refs, [self.name], what, timeout_s or self.config.call_timeout_s))[0]

    async def ask(self, method: str, *arguments: Any) -> Any:
        actor, line = self.actor, self._line
        if actor is None or line is None or self.health == "DEAD":
            raise PartDown(f"{self.name} is {self.health}: {self.reason}")
        try:
            if method in ON_LINE:
                return await self._on_line(line, method, *arguments)
            ref = getattr(actor, method).remote(self.epoch, *arguments)
            try:
                return await self._ask([ref], method)
            except asyncio.CancelledError:
                ray.cancel(ref)
                raise
        except StateLost as error:
            self.lost(actor, str(error))
            if actor is self._remade:
                raise PartDown(f"{self.name} is made anew: {self.reason}") from None
            raise

    async def _on_line(self, line: Line, method: str, *arguments: Any) -> Any:
        """A sample that may be frozen has its deadline in the engine, where it is known when it was; here it is seen that the engine
        answers at all."""
        call = asyncio.ensure_future(line.call(method, self.epoch, *arguments))
        try:
            while not (await asyncio.wait((call,), timeout=self.config.call_timeout_s))[0]:
                if method != "sample" or self.config.in_flight != "keep":
                    raise remote.Overdue(f"{method}: no answer within {self.config.call_timeout_s:g} s from {self.name}")
                await self.status()
            return call.result()
        finally:
            if not call.cancel() and not call.cancelled():
                call.exception()  # it ended as its caller gave it up: nobody else asks

    def _line_to(self, actor: ActorHandle) -> Line:
        async def find() -> Address:
            return await self._ask([actor.get_line.remote(self.epoch, remote.node_address())], "line")

        return Line(find)

    async def status(self) -> EngineStatus:
        assert self.actor is not None
        return await self._ask([self.actor.status.remote()], "status", VITALS_TIMEOUT_S)

    def lost(self, actor: ActorHandle, reason: str) -> None:
        if actor is self.actor:
            if self._line is not None:
                self._line.hang_up()
            self.died(reason)

    def remake(self, reason: str) -> None:
        """Its memory is free at once, not first when it is started again."""
        if self.actor is not None and self.health != "DEAD":
            self._remade = self.actor
            if self._line is not None:
                self._line.hang_up()
            ray.kill(self.actor)
        super().remake(reason)

    def last_words(self) -> str:
        return _tail(self._log_file)

    async def _come_back(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await remote.end_named([self.site.name])
        self._step("again")
        await self._started_and_joined()

    async def _started_and_joined(self) -> None:
        assert self.joining is not None
        started = time.perf_counter()
        if self.site.spec.device == "gpu":  # vLLM wants the device's memory to be free when it starts
            async with self.joining():
                await self._make()
                await self._join()
        else:
            await self._make()
            async with self.joining():
                await self._join()
        self._say(f"{self.name} runs again ({time.perf_counter() - started:.1f} s)")

    async def _join(self) -> None:
        if self.health == "DEAD":  # while it waited for its phase
            raise StateLost(f"{self.name} died before it could join: {self.reason}")
        self._step("started")
        if self.wanted != self.gate.state:
            try:
                async with self.gate.hold(self.wanted):
                    pass
            except WeightsGone as error:  # its weights are gone, and it is not: who asks for them has them made anew
                self._say(f"{self.name} runs without weights: {error}")
        if self.health == "DEAD":
            raise StateLost(f"{self.name} died while it joined: {self.reason}")
        self._step("ready")

    async def detach(self) -> None:
        await self._no_more_restarts()
        await remote.ended(self._watching)
        if self._line is not None:
            await self._line.close()

    async def close(self) -> None:
        await self.detach()
        await remote.end_named([self.site.name])


def _tail(file: str) -> str:
    try:
        lines = Path(file).read_text(errors="replace").splitlines()[-TAIL_LINES:]
    except OSError:
        return ""
    return "\n".join([f"last lines of its log ({file}):", *lines])
