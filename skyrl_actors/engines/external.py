"""An engine that somebody else runs: a vLLM server by URL. It serves the base and adapters, and its memory is its own."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from skyrl_actors.colocation.gate import Gate
from skyrl_actors.config.cluster import RestartConfig
from skyrl_actors.config.engines import EngineConfig, ExternalEngine
from skyrl_actors.engines.interface import BASE_VERSION, EngineStatus
from skyrl_actors.engines.member import Member
from skyrl_actors.engines.partials import Partials
from skyrl_actors.engines.vllm_server import VllmServer
from skyrl_actors.messages.errors import ConfigError, InternalError, StateLost
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import PartialSample, SampleOutput
from skyrl_actors.messages.weights import WeightManifest


class ExternalMember(Member):
    ours = False

    def __init__(
        self, name: str, asked: ExternalEngine, api_key: str | None, config: EngineConfig, restart: RestartConfig,
        say: Callable[[str], None],
    ):  # fmt: skip
        super().__init__(name, restart, say)
        self.asked = asked
        self.config = config
        self.server = VllmServer(asked.url, api_key, config.call_timeout_s)
        self.gate = Gate[str](BASE_VERSION, _never)
        self._model = ""
        self._adapters: set[str] = set()
        self._put_there: set[str] = set()  # also in an earlier life of its, which it may still have
        self._life = 0
        self._adapter_lock = asyncio.Lock()
        self._running = 0
        self._partials = Partials()

    async def take_over(self) -> bool:
        try:
            await self.start()
        except ConfigError as error:
            self._say(f"{self.name}: {error}")
            return False
        return True

    async def start(self) -> None:
        """Raises ConfigError when it is not there, or is no vLLM server that takes what this service promises."""
        if self.health == "HEALTHY":
            return
        self._model, longest = await self.server.identify(self.asked.model)
        if longest < self.config.max_model_len:
            raise ConfigError(
                f"engine.external {self.asked.url} takes at most {longest} tokens and engine.max_model_len is "
                f"{self.config.max_model_len}; lower it, or start the server with --max-model-len {self.config.max_model_len}"
            )
        self._adapters, self.delivered, self.agreed = set(), {}, {}
        self._life += 1
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
        self._say(f"{self.name} answers again ({time.perf_counter() - started:.1f} s)")

    async def ask(self, method: str, *arguments: Any) -> Any:
        if self.health == "DEAD":
            raise StateLost(f"{self.name} is {self.health}: {self.reason}")
        verbs = {"sample": self._sample, "partial": self._partials.after, "drop_adapters": self._drop_adapters}
        life = self._life
        try:
            return await verbs[method](*arguments)
        except InternalError as error:
            # Of one sample, or of the server? A late word of an earlier life says nothing of this one.
            if not await self.server.alive() and life == self._life and self.health == "HEALTHY":
                self.died(str(error))
            raise

    async def _sample(
        self, request_id: str, prompt: tuple[int, ...], params: SamplingParams, adapter: WeightManifest | None, version: str
    ) -> SampleOutput:
        if adapter is not None:
            await self._has(adapter)
        model = adapter.version if adapter else self._model
        self._running += 1
        try:
            if not params.stream or params.prompt_logprobs or params.topk_prompt_logprobs:
                return await self.server.complete(model, prompt, params, version)
            async with asyncio.timeout(self.config.call_timeout_s):
                return await self.server.grow(
                    model, prompt, params, version, lambda so_far: self._partials.grow(request_id, so_far)
                )
        except TimeoutError:
            raise InternalError(f"{self.name} did not finish {request_id} within {self.config.call_timeout_s:.0f} s") from None
        except StateLost:
            if adapter is not None:  # it may have lost it without a word: it was started anew
                self._adapters.discard(adapter.version)
            raise
        finally:
            self._running -= 1
            self._partials.end(request_id)

    async def _has(self, adapter: WeightManifest) -> None:
        async with self._adapter_lock:
            if adapter.version not in self._adapters:
                await self.server.load_adapter(adapter.version, adapter.path)
                self._adapters.add(adapter.version)
                self._put_there.add(adapter.version)

    async def _drop_adapters(self, versions: tuple[str, ...]) -> None:
        async with self._adapter_lock:
            for version in versions:
                if version in self._put_there:
                    await self.server.unload_adapter(version)
                    self._adapters.discard(version)
                    self._put_there.discard(version)

    async def partial(self, request_id: str, have: int, timeout_s: float) -> PartialSample:
        return await self._partials.after(request_id, have, timeout_s)

    async def status(self) -> EngineStatus:
        return EngineStatus(BASE_VERSION, tuple(self._adapters), False, 0, self._running)

    async def detach(self) -> None:
        await self._no_more_restarts()

    async def close(self) -> None:
        """The server goes on; what this service put there goes."""
        await self.detach()
        if self.health != "DEAD":
            try:
                await self._drop_adapters(tuple(self._put_there))
            except InternalError as error:
                self._say(f"{self.name} keeps adapters of this service: {error}")
        await self.server.close()


async def _never(old: str, new: str) -> None:
    raise InternalError("an engine by URL takes no full weights")
