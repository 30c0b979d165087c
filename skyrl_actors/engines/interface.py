"""The engine's interface without vLLM: the methods that the pool calls on actors."""

from dataclasses import dataclass
from typing import Literal, Protocol

from skyrl_actors.engines.received_files import Files
from skyrl_actors.messages.device_usage import DeviceUsage
from skyrl_actors.messages.images import Picture
from skyrl_actors.messages.model import EngineTopology, ExpertLayout
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import PartialSample, SampleOutput
from skyrl_actors.messages.weights import WeightManifest, WeightStream
from skyrl_actors.transport.handshake import PROTOCOL_VERSION

BASE_VERSION = "base"
CHECK = ".check"  # suffix of the request id under which an engine scores the logprob check
FLAG = "processed_logprobs"  # in vLLM's extra_args; also the name of the patch
TEMPERATURE_ONLY = "temperature"  # its value if top_k and top_p are left out; else True
ALL_WEIGHTS = "skyrl_actors_full_weights"  # the weight-transfer backend that vLLM looks up
LIBRARIES = {"vllm": "vLLM", "jax": "JAX"}  # by engine.type
ONE_DEVICE = EngineTopology()
PROCESSED = 2**31 - 1  # the token id of such a logprob; beyond every vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Everything an engine actor needs to start."""

    name: str
    base_folder: str
    type: Literal["vllm", "jax"] = "vllm"
    device: Literal["cpu", "gpu"]
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_bytes: int
    max_loras: int
    max_lora_rank: int
    max_adapters: int
    enforce_eager: bool
    call_timeout_s: float
    topology: EngineTopology = ONE_DEVICE
    device_ids: tuple[str, ...] = ()  # of its GPUs, if it has several on one node
    over_nodes: bool = False
    keeps_in_flight: bool = False  # sleep freezes samples instead of waiting for them
    arguments: str = "{}"  # further arguments of vLLM, as JSON
    environment: tuple[tuple[str, str], ...] = ()  # the config's; with others it is restarted
    protocol: int = PROTOCOL_VERSION  # of its RPC; one of another version is not taken over
    planned_bytes: int = 0  # on each of its GPUs, by the memory plan; 0: not known
    expert_layout: ExpertLayout = "shared_outer"  # of adapters
    takes_full_weights: bool = True  # live updates; the engine proves them at its start
    router_replay: bool = False  # samples bring the experts of their tokens
    prepare_s: float = 0.0  # longest time to compile programs of JAX ahead
    tool_parser: str | None = None  # vLLM's name of the parser of tool calls
    max_images: int = 0  # of a prompt; 0 if the base takes none


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """One engine's weights, load, memory and cache use, as it reports them."""

    loaded_version: str | None  # of the full weights; None after the weights were dropped
    adapters: tuple[str, ...]
    asleep: bool
    rss_bytes: int  # 0 in the process of a rank, which reports its own
    devices: tuple[DeviceUsage, ...] = ()  # empty in the process of a rank as well
    running: int  # samples that it received and has not answered
    waiting: int = 0  # of these, sequences that vLLM has not started
    kv_usage: float = 0.0  # share of the KV cache in use, 0 to 1
    prefix_queries: int = 0  # prompt tokens so far; prefix_hits of them were in the cache
    prefix_hits: int = 0
    adapts_head: bool = True  # accepts adapters on the output layer
    check_prompt: tuple[int, ...] = ()  # token ids for the logprob check; see check_prompt.py


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """An engine's state, reported to a controller that takes it over."""

    spec: EngineSpec
    ready: bool  # started, and vLLM's process is alive
    status: EngineStatus | None
    log_file: str


class EngineCalls(Protocol):
    """Calls so frequent that the actor serves them over RPC, not through Ray.

    `epoch` is the controller's; the engine refuses an earlier one.
    """

    async def sample(
        self,
        epoch: int,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        adapter: WeightManifest | None,
        version: str,
        pictures: tuple[Picture, ...] = (),
    ) -> SampleOutput: ...

    async def partial(
        self, epoch: int, request_id: str, have: int, timeout_s: float
    ) -> PartialSample: ...


class EngineProcess(Protocol):
    """The calls that an engine answers; see VllmEngine for their meaning."""

    async def start(self) -> None: ...

    async def sample(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        adapter: WeightManifest | None,
        version: str,
        pictures: tuple[Picture, ...] = (),
    ) -> SampleOutput: ...

    async def partial(self, request_id: str, have: int, timeout_s: float) -> PartialSample: ...

    async def load_full(
        self,
        version: str,
        parts: tuple[WeightManifest, ...],
        streams: tuple[WeightStream | None, ...] = (),
    ) -> float:
        """Replace the engine's weights; return seconds. No sample may be running."""
        ...

    async def receive(self, path: str, files: Files) -> None: ...

    async def discard(self, path: str) -> None: ...

    async def drop_adapters(self, versions: tuple[str, ...]) -> None: ...

    async def sleep(self, level: int) -> int: ...

    async def release_kv(self, weights_stay: bool) -> int: ...

    async def wake(self, tag: Literal["weights", "kv_cache"]) -> int: ...

    async def status(self) -> EngineStatus: ...

    async def stop(self) -> None: ...
