"""What an engine offers, without vLLM: the pool calls these methods on actors."""

from dataclasses import dataclass
from typing import Literal, Protocol

from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import SampleOutput
from skyrl_actors.messages.weights import WeightManifest, WeightStream

BASE_VERSION = "base"
CHECK = ".check"  # behind the id of the sample for which an engine is compared with the trainer
FLAG = "tempered_logprobs"  # in vLLM's extra_args; also the name of the patch
TEMPERED = 2**31 - 1  # beyond every vocabulary: the id under which a worker answers it
ON_LINE = ("sample", "partial")  # what is asked of an engine so often that its actor has a line for it


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """All an engine actor needs to start."""

    name: str
    base_folder: str
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
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    device_ids: tuple[str, ...] = ()  # of its GPUs, where it has several on one node
    over_nodes: bool = False
    keeps_in_flight: bool = False  # samples are frozen, and not waited for, when it goes to sleep
    takes_full_weights: bool = True  # live updates, which are proved at its start


@dataclass(frozen=True, slots=True)
class EngineStatus:
    loaded_version: str | None  # of the full weights; None when they were dropped
    adapters: tuple[str, ...]
    asleep: bool
    rss_bytes: int
    running: int  # samples it was given and has not answered
    waiting: int = 0  # of these, sequences that vLLM has not begun
    kv_usage: float = 0.0  # part of the KV cache in use, 0 to 1
    prefix_queries: int = 0  # prompt tokens so far, and those of them that the cache had
    prefix_hits: int = 0
    adapts_head: bool = True  # takes adapters that reach the output layer


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What an engine says of itself to a controller that takes it over."""

    spec: EngineSpec
    ready: bool  # started, and vLLM's process below it lives
    status: EngineStatus | None
    log_file: str


class Engine(Protocol):
    async def start(self) -> None: ...

    async def sample(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        adapter: WeightManifest | None,
        version: str,
    ) -> SampleOutput: ...

    async def load_full(
        self, version: str, parts: tuple[WeightManifest, ...], streams: tuple[WeightStream | None, ...] = ()
    ) -> float:
        """Replace the engine's weights; returns seconds. No sample may be running."""
        ...

    async def receive(self, path: str, files: dict[str, bytes]) -> None: ...

    async def discard(self, path: str) -> None: ...

    async def drop_adapters(self, versions: tuple[str, ...]) -> None: ...

    async def sleep(self, level: int) -> int: ...

    async def release_kv(self, weights_stay: bool) -> int: ...

    async def wake(self, tag: Literal["weights", "kv_cache"]) -> int: ...

    async def status(self) -> EngineStatus: ...

    async def stop(self) -> None: ...
