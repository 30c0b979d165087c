"""One vLLM engine. It samples with the weights that the caller names and refuses any others."""

import asyncio
import logging
import threading
import time
from pathlib import Path
from typing import Any, Literal

import psutil
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from skyrl_actors.engines import received_files
from skyrl_actors.engines.check_prompt import continued, fixed_prompt
from skyrl_actors.engines.deadlines import PausableDeadlines
from skyrl_actors.engines.engine_args import engine_args, refused
from skyrl_actors.engines.interface import BASE_VERSION, FLAG, EngineSpec, EngineStatus
from skyrl_actors.engines.last_exception import own_last_exception
from skyrl_actors.engines.partials import Partials
from skyrl_actors.engines.received_files import Files
from skyrl_actors.engines.reload_proof import prove_adapter, prove_reload
from skyrl_actors.engines.routed_experts import RoutedExperts, routed_by
from skyrl_actors.engines.tool_calls import ToolCalls, with_calls
from skyrl_actors.engines.vllm_adapters import ZEROS, VllmAdapters
from skyrl_actors.engines.vllm_processed import take_marked_ids
from skyrl_actors.engines.vllm_prompts import VllmPrompts, check_expanded
from skyrl_actors.engines.vllm_samples import as_output, so_far, vllm_params, weight_versions
from skyrl_actors.engines.vllm_stats import LastStats
from skyrl_actors.engines.weight_parts import TowerOfEngine, base_parts, missing_files, update_info
from skyrl_actors.messages.errors import ConfigError, InternalError, InvalidRequest
from skyrl_actors.messages.images import Picture
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import SampleOutput
from skyrl_actors.messages.weights import WeightManifest, WeightStream
from skyrl_actors.observe.process import resident_bytes
from skyrl_actors.storage.files import remove

log = logging.getLogger(__name__)


class VllmEngine:
    """Start vLLM, sample, load weights, sleep and wake. Runs inside an EngineActor."""

    def __init__(self, spec: EngineSpec):
        self.spec = spec
        self._llm: AsyncLLM | None = None
        self._loaded: str | None = None
        self._tower = TowerOfEngine(spec)
        self._adapts_head = True
        # Held while an adapter changes and while the engine goes to sleep, so neither interrupts
        # the other.
        self._adapter_lock = asyncio.Lock()
        self._awake = {"weights", "kv_cache"}
        self._woken = asyncio.Event()
        self._deadlines = PausableDeadlines(spec.call_timeout_s)
        self._running = 0
        self._check_prompt: tuple[int, ...] = ()
        self._processes_logprobs = False  # those of the sampling distribution
        self._routed: RoutedExperts | None = None
        self._tool_calls: ToolCalls | None = None
        self._prompts = VllmPrompts(spec.base_folder, spec.max_images)
        self._stats = LastStats(self._deadlines)
        self.partials = Partials()
        self._processes: list[psutil.Process] = []
        self.dead = asyncio.Event()  # vLLM's own process has ended
        shapes = {t.name: t.shape for part in base_parts(spec) for t in part.tensors}
        self._adapters = VllmAdapters(spec, shapes, self.dead, self._deadlines)

    async def start(self) -> None:
        try:
            self._llm = AsyncLLM.from_engine_args(
                engine_args(self.spec), stat_loggers=[self._stats]
            )
        except ValueError as error:
            raise refused(error) from error
        except RuntimeError as error:
            raise InternalError(f"vLLM did not start: {own_last_exception() or error}") from error
        take_marked_ids()
        patched = await self._llm.collective_rpc("skyrl_patch")
        self._processes_logprobs = all(FLAG in names for names in patched)
        self._adapts_head = all(await self._llm.collective_rpc("skyrl_adapts_head"))
        if self.spec.router_replay:
            self._routed = await routed_by(self._llm)
        if self.spec.tool_parser:
            self._tool_calls = ToolCalls(self.spec.tool_parser, self._llm.get_tokenizer())
        await self._llm.update_weight_version(BASE_VERSION)
        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
        self._loaded = BASE_VERSION
        await self._prove()
        self._check_prompt = await continued(
            self.sample,
            Path(self.spec.base_folder),
            self.llm.model_config.get_vocab_size(),
            self.spec.max_model_len,
        )
        loop = asyncio.get_running_loop()
        self._processes = psutil.Process().children(recursive=True)
        for child in psutil.Process().children():
            threading.Thread(
                target=self._wait_for_end,
                args=(child, loop),
                daemon=True,
                name=f"watch-{child.pid}",
            ).start()

    async def _prove(self) -> None:
        """Raise ConfigError if vLLM cannot compute the model, alone, updated or with an adapter."""
        config = self.llm.model_config
        prompt = fixed_prompt(
            config.get_vocab_size(), self.spec.max_model_len, self._prompts.placeholder
        )
        parts = base_parts(self.spec) if self.spec.takes_full_weights else ()
        if self.spec.takes_full_weights and not parts:
            raise ConfigError(
                f"{self.spec.base_folder} has no safetensors files, from which an engine takes the "
                "base's weights again after those of a full fine-tune; convert its weights"
            )
        await prove_reload(self, config.architecture, self.spec.dtype, prompt, parts)
        await self._adapters.add_zeros(self.llm)
        await prove_adapter(self, config.architecture, self.spec.dtype, prompt, ZEROS)
        await self.drop_adapters((ZEROS.version,))

    def _wait_for_end(self, process: psutil.Process, loop: asyncio.AbstractEventLoop) -> None:
        process.wait()
        if not loop.is_closed():
            loop.call_soon_threadsafe(self.dead.set)

    def died_of(self, error: Exception) -> bool:
        """Return whether vLLM's process has ended, according to this error or the watcher."""
        if isinstance(error, EngineDeadError):
            self.dead.set()
        return self.dead.is_set()

    async def why(self, error: Exception) -> str:
        """Return an error's text. vLLM only says that its process ended; the cause is added."""
        if not isinstance(error, EngineDeadError):
            return str(error)
        cause = await asyncio.to_thread(own_last_exception)
        return f"vLLM's process ended: {cause or error}"

    @property
    def llm(self) -> AsyncLLM:
        if self._llm is None:
            raise InternalError("the engine was not started")
        return self._llm

    async def sample(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        adapter: WeightManifest | None,
        version: str,
        pictures: tuple[Picture, ...] = (),
    ) -> SampleOutput:
        """Sample. `version` names the weights; with an adapter, the base plus that adapter.

        Raises InvalidRequest for parameters that vLLM refuses. Raises InternalError after the
        deadline, or if vLLM sampled with other weights. Raises StateLost after the deadline if vLLM
        computes nothing at all.
        """
        if params.processes and not self._processes_logprobs:
            raise InvalidRequest(
                "tempered_logprobs and processed_logprobs are not available with this release of "
                "vLLM; leave them out"
            )
        if self._routed:
            self._routed.check(len(prompt), params)
        needed = BASE_VERSION if adapter else version
        lora = await self._prepare(adapter, needed)
        output: Any = None
        self._running += 1
        try:
            async with self._deadlines.of_sample(request_id, self.spec.name):
                given = await self._prompts.given(prompt, pictures)
                stream = self.llm.generate(
                    given,
                    vllm_params(params, self._prompts.placeholder),
                    request_id,
                    lora_request=lora,
                )
                async for part in stream:
                    output = part
                    if params.stream:
                        self.partials.grow(request_id, so_far(part, params))
        except (VLLMValidationError, ValueError) as error:
            raise InvalidRequest(str(error)) from None
        except EngineDeadError as error:
            self.dead.set()
            raise InternalError(await self.why(error)) from error
        finally:
            self._running -= 1
            self._adapters.release(adapter)
            self.partials.end(request_id)
        if unexpected := weight_versions(output) - {needed}:
            raise InternalError(
                f"engine {self.spec.name} sampled with weights {', '.join(sorted(unexpected))}, "
                f"not {needed} alone"
            )
        check_expanded(output, prompt, pictures)
        found = as_output(output, version, params, self._routed)
        return await with_calls(found, params.tools, self._tool_calls)

    async def _prepare(self, adapter: WeightManifest | None, needed: str) -> LoRARequest | None:
        """Wait until the engine holds the needed weights and the adapter, which is then in use.

        The engine may go to sleep at any time afterwards. vLLM then starts the sample when it
        wakes.
        """
        seeker = object()
        try:
            while True:
                if adapter is not None:  # before the lock: others do not wait for these files
                    await self._adapters.check(adapter)
                async with self._adapter_lock:
                    if freezes := self.asleep and self.spec.keeps_in_flight:
                        self._woken.clear()
                    elif self.asleep or self._loaded != needed:
                        raise InternalError(
                            f"engine {self.spec.name} holds {self._loaded} "
                            f"(asleep: {self.asleep}), not {needed}"
                        )
                    elif adapter is None:
                        return None
                    elif (lora := await self._adapters.taken(self.llm, adapter)) is not None:
                        return lora
                if freezes:
                    await self._woken.wait()
                elif adapter is not None:
                    await self._adapters.resident.changed(seeker, adapter.version)
        finally:
            self._adapters.resident.leave(seeker)

    async def drop_adapters(self, versions: tuple[str, ...]) -> None:
        async with self._adapter_lock:
            for version in versions:
                await self._adapters.drop(self.llm, version)

    async def load_full(
        self,
        version: str,
        parts: tuple[WeightManifest, ...],
        streams: tuple[WeightStream | None, ...] = (),
    ) -> float:
        """Replace the engine's weights; return seconds. No sample may be running.

        `streams`: for each part, the stream it comes from, or None to read the part's path.

        A failure during the update leaves vLLM with layers of neither version. The engine then
        counts as dead.
        """
        started = time.perf_counter()
        completed, streams = self._tower.completed(parts, streams)
        if missing := await asyncio.to_thread(missing_files, completed, streams):
            raise InternalError(
                f"weights {version} cannot be read on this engine's host: {', '.join(missing)}"
            )
        self._loaded, whole = None, False
        try:
            async with asyncio.timeout(self.spec.call_timeout_s):
                await self.llm.start_weight_update()
                for part, stream in zip(completed, streams, strict=True):
                    await self.llm.update_weights(
                        WeightTransferUpdateRequest(update_info=update_info(part, stream))
                    )
                await self.llm.finish_weight_update(version)
                holds = await self.llm.get_weight_version()
            whole = True
        finally:
            if not whole:
                self.dead.set()
        if holds != version:
            raise InternalError(
                f"engine {self.spec.name} reports weights {holds} after it received {version}"
            )
        self._adapters.resident.clear()  # vLLM drops all adapters with a weight update
        if self._tower.changed(version, parts):
            await self.llm.reset_encoder_cache()  # its keys are the images alone
        if not self.asleep:
            await self.llm.reset_prefix_cache()
        self._loaded = version
        return time.perf_counter() - started

    async def receive(self, path: str, files: Files) -> None:
        """Write files from the object store: one file at `path` (key ""), or a folder of files."""
        await asyncio.to_thread(received_files.write, Path(path), files)

    async def reads(self, path: str, content: str) -> bool:
        file = Path(path)
        return await asyncio.to_thread(lambda: file.is_file() and file.read_text() == content)

    async def discard(self, path: str) -> None:
        await asyncio.to_thread(remove, Path(path))

    @property
    def asleep(self) -> bool:
        return len(self._awake) < 2

    async def sleep(self, level: int) -> int:
        """Free memory; return the bytes freed. Sleeping twice is allowed.

        Frozen samples lose their KV cache. vLLM computes it again from their tokens on waking.
        """
        async with self._adapter_lock:
            if not self._awake:
                return 0
            before = await self._used_bytes()
            await self.llm.sleep(level, mode="keep" if self.spec.keeps_in_flight else "wait")
            self._awake = set()
            self._deadlines.pause()
            if level == 2:
                self._loaded = None
            return max(0, before - await self._used_bytes())

    async def release_kv(self, weights_stay: bool) -> int:
        """Free only the KV cache; return the bytes freed.

        vLLM cannot do this while it keeps frozen samples. If the weights stay, the engine then
        sleeps and wakes without its cache. If they do not, the `sleep` that follows frees both.
        """
        async with self._adapter_lock:
            if self.asleep:
                return 0
            if not self._running:  # new samples queue for this lock
                before = await self._used_bytes()
                await self.llm.engine_core.pause_scheduler_async(mode="wait", clear_cache=False)
                await self.llm.engine_core.release_kv_cache_memory_async()
                self._awake.discard("kv_cache")
                if weights_stay:  # otherwise the sleep that follows trims too
                    await self.llm.collective_rpc("skyrl_trim")
                return max(0, before - await self._used_bytes())
        return await self.sleep(1) - await self.wake("weights") if weights_stay else 0

    async def wake(self, tag: Literal["weights", "kv_cache"]) -> int:
        """Allocate memory; return the bytes. On a CPU, pages appear when they are touched."""
        if tag in self._awake:
            return 0
        before = await self._used_bytes()
        await self.llm.wake_up([tag])
        self._awake.add(tag)
        if not self.asleep:
            self._woken.set()
            self._deadlines.resume()
        return max(0, await self._used_bytes() - before)

    async def _used_bytes(self) -> int:
        if self.spec.device == "gpu":
            return sum(await self.llm.collective_rpc("skyrl_used_bytes"))
        return sum(resident_bytes(process) for process in self._processes)

    async def status(self) -> EngineStatus:
        process = psutil.Process()
        rss = sum(resident_bytes(p) for p in [process, *process.children(recursive=True)])
        stats = self._stats
        return EngineStatus(
            loaded_version=self._loaded,
            adapters=self._adapters.resident.versions,
            asleep=self.asleep,
            rss_bytes=rss,
            running=self._running,
            waiting=stats.waiting,
            kv_usage=stats.kv_usage,
            prefix_queries=stats.prefix_queries,
            prefix_hits=stats.prefix_hits,
            adapts_head=self._adapts_head,
            check_prompt=self._check_prompt,
        )

    async def stop(self) -> None:
        if self._llm is not None:
            self._llm.shutdown()
            self._llm = None
