"""An engine that this service does not run: a vLLM server by URL.

It serves the base model and adapters. It manages its own memory.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate

from skyrl_actors.colocation.state_lock import StateLock
from skyrl_actors.config.engines import EngineConfig, ExternalEngineConfig
from skyrl_actors.config.restart import RestartConfig
from skyrl_actors.engines.interface import BASE_VERSION, EngineStatus
from skyrl_actors.engines.partials import Partials
from skyrl_actors.engines.replica import EngineReplica, P, R
from skyrl_actors.engines.versions import once
from skyrl_actors.engines.vllm_server import VllmServer
from skyrl_actors.messages.errors import ConfigError, InternalError, StateLost
from skyrl_actors.messages.images import Picture
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import PartialSample, SampleOutput
from skyrl_actors.messages.weights import WeightManifest
from skyrl_actors.remote import Actors


class ExternalEngine(EngineReplica):
    """A replica that sends samples and adapters to a vLLM server over HTTP."""

    managed = False

    def __init__(
        self,
        name: str,
        asked: ExternalEngineConfig,
        api_key: str | None,
        config: EngineConfig,
        restart: RestartConfig,
        report: Callable[[str], None],
    ):
        super().__init__(name, restart, report)
        self.asked = asked
        self.config = config
        self.server = VllmServer(asked.url, api_key, restart.call_timeout_s)
        self.lock = StateLock[str](BASE_VERSION, _never)
        self._model = ""
        self._adapters: set[str] = set()
        # Adapters that this service loaded, also before a restart of the server.
        self._sent_adapters: set[str] = set()
        self._unloading = asyncio.Lock()
        self._loads: dict[str, asyncio.Task[None]] = {}  # by version
        self._running = 0
        self._partials = Partials()

    async def take_over(self, actors: Actors) -> bool:
        try:
            await self.start()
        except ConfigError as error:
            self._report(f"{self.name}: {error}")
            return False
        return True

    async def start(self) -> None:
        """Become HEALTHY. Raise ConfigError if the server is absent, no vLLM, or too limited."""
        if self.health == "HEALTHY":
            return
        self._model, longest = await self.server.identify()
        if longest < self.config.max_model_len:
            raise ConfigError(
                f"engine.external {self.asked.url} takes at most {longest} tokens and "
                f"engine.max_model_len is {self.config.max_model_len}; lower it, or start the "
                f"server with --max-model-len {self.config.max_model_len}"
            )
        self._adapters = set()
        self._begin_incarnation()
        self._step("started")
        self._step("ready")

    async def _come_back(self) -> None:
        started = time.perf_counter()
        self._step("again")
        try:
            await self.start()
        except ConfigError as error:
            raise InternalError(str(error)) from error
        self.worked()
        self._report(f"{self.name} answers again ({time.perf_counter() - started:.1f} s)")

    async def ask(
        self,
        method: Callable[Concatenate[Any, P], Awaitable[R]],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> R:
        if self.health == "DEAD":
            raise StateLost(f"{self.name} is {self.health}: {self.reason}")
        verbs: dict[str, Callable[..., Awaitable[Any]]] = {
            "sample": self._sample,
            "partial": self._partials.after,
            "drop_adapters": self._drop_adapters,
        }
        incarnation = self.incarnation
        try:
            return await verbs[method.__name__](*arguments, **named)
        except InternalError as error:
            # The error may concern one sample or the whole server, so ask the server.
            # An error that arrives late, from before a restart, does not concern this start.
            if (
                not await self.server.alive()
                and incarnation == self.incarnation
                and self.health == "HEALTHY"
            ):
                self.died(str(error))
            raise

    async def _sample(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        adapter: WeightManifest | None,
        version: str,
        pictures: tuple[Picture, ...] = (),
    ) -> SampleOutput:
        if pictures:
            raise InternalError(f"{self.name} was given images, which go to own engines only")
        if adapter is not None:
            await self._ensure_adapter(adapter)
        model = adapter.version if adapter else self._model
        self._running += 1
        try:
            if not params.stream or params.prompt_logprobs or params.topk_prompt_logprobs:
                return await self.server.complete(model, prompt, params, version)
            async with asyncio.timeout(self.restart.call_timeout_s):
                return await self.server.grow(
                    model,
                    prompt,
                    params,
                    version,
                    lambda so_far: self._partials.grow(request_id, so_far),
                )
        except TimeoutError:
            raise InternalError(
                f"{self.name} did not finish {request_id} within "
                f"{self.restart.call_timeout_s:.0f} s"
            ) from None
        except StateLost:
            if adapter is not None:  # a restarted server has lost its adapters
                self._adapters.discard(adapter.version)
            raise
        finally:
            self._running -= 1
            self._partials.end(request_id)

    async def _ensure_adapter(self, adapter: WeightManifest) -> None:
        """Load an adapter once for all that wait; samples with other adapters do not wait."""
        if adapter.version not in self._adapters:
            await once(self._loads, adapter.version, lambda: self._load_adapter(adapter))

    async def _load_adapter(self, adapter: WeightManifest) -> None:
        try:
            await self.server.load_adapter(adapter.version, adapter.path)
            self._adapters.add(adapter.version)
            self._sent_adapters.add(adapter.version)
        finally:
            self._loads.pop(adapter.version, None)

    async def _drop_adapters(self, versions: tuple[str, ...]) -> None:
        for version in versions:
            if (loading := self._loads.get(version)) is not None:
                await asyncio.wait((loading,))
            async with self._unloading:
                if version in self._sent_adapters:
                    await self.server.unload_adapter(version)
                    self._adapters.discard(version)
                    self._sent_adapters.discard(version)

    async def partial(self, request_id: str, have: int, timeout_s: float) -> PartialSample:
        return await self._partials.after(request_id, have, timeout_s)

    async def status(self) -> EngineStatus:
        return EngineStatus(
            loaded_version=BASE_VERSION,
            adapters=tuple(self._adapters),
            asleep=False,
            rss_bytes=0,
            running=self._running,
        )

    async def detach(self) -> None:
        await super().detach()

    async def close(self) -> None:
        """Stop watching and remove this service's adapters; the server keeps running."""
        await self.detach()
        if self.health != "DEAD":
            try:
                await self._drop_adapters(tuple(self._sent_adapters))
            except InternalError as error:
                self._report(f"{self.name} still holds adapters of this service: {error}")
        await self.server.close()


async def _never(old: str, new: str) -> None:
    raise InternalError("an engine by URL does not take full weights")
