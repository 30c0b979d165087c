"""Engines of the service, and external vLLM servers."""

from importlib.util import find_spec
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from skyrl_actors.config import vllm_arguments
from skyrl_actors.config.frozen import FrozenConfig
from skyrl_actors.config.strategies import JaxStrategy, StrategyConfig, mesh_ranks
from skyrl_actors.messages.model import EngineTopology


class ExternalEngineConfig(FrozenConfig):
    """A vLLM server outside this service.

    It serves the base model, which it lists first, and the adapters that it reads from
    transfer.folder.
    """

    url: str = Field(
        description="address of an OpenAI-compatible vLLM server, for example http://host:8000"
    )
    api_key_env: str | None = Field(
        default=None,
        description="environment variable of the controller that contains the "
        "API key of that server",
    )

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r}: use http://host:port or https://host:port")
        return url.rstrip("/").removesuffix("/v1")


class EngineConfig(FrozenConfig):
    """The engines that sample.

    `vllm`, the default: vLLM. `jax`: programs that JAX compiles, for devices that vLLM does not run
    on; without a prefix cache, several devices for one engine, engines by URL, or tools.
    """

    type: Literal["vllm", "jax"] = "vllm"
    process: Literal["own", "policy"] = Field(
        default="own",
        description="only with `jax`: process of an engine. own: its own; policy: that of the "
        "policy rank with the same devices, whose base model it shares without a copy. TPUs, which "
        "serve one process, need it in the layouts colocated and mixed",
    )
    num_engines: int = Field(
        default=1,
        ge=0,
        description="number of engines that this service runs; 0 = only those in `external`",
    )
    external: tuple[ExternalEngineConfig, ...] = Field(
        default=(),
        description="external vLLM servers that also sample: [{url: http://host:8000}]; "
        "samples are distributed by load",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="data type of computation"
    )
    max_model_len: int = Field(
        default=512, ge=8, description="largest number of tokens of a prompt with its answer"
    )
    max_num_seqs: int = Field(
        default=128, ge=1, description="sequences that one engine computes at once"
    )
    max_num_batched_tokens: int = Field(
        default=4096, ge=8, description="tokens of one pass of an engine"
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        description="number of devices of one node that share each layer of an engine",
    )
    pipeline_parallel: int = Field(
        default=1,
        ge=1,
        description="number of stages of an engine's layers, each on tensor_parallel devices",
    )
    kv_cache_bytes: int = Field(
        default=128 * 2**20,
        ge=2**20,
        description="size of the KV cache on each device of an engine",
    )
    max_loras: int = Field(default=4, ge=1, description="number of different adapters in one batch")
    enforce_eager: bool = Field(default=True, description="run without CUDA graphs and compilation")
    sleep_level: Literal["auto", "1", "2"] = Field(
        default="auto",
        description="weights of a sleeping engine. 1: kept in host memory; 2: dropped; "
        "auto: dropped if a full fine-tune sends them again",
    )
    in_flight: Literal["drain", "keep", "abort"] = Field(
        default="drain",
        description="running samples when training needs their devices. "
        "drain: training waits for them; keep: they are suspended and later continue from their "
        "tokens; abort: they are restarted, at most once each",
    )
    slice_s: float = Field(
        default=1.0,
        ge=0,
        description="keep and abort: time that engines can sample before training gets the "
        "devices. With keep, choose many times what vLLM needs to compute the KV cache of the "
        "suspended samples again",
    )
    num_threads: int = Field(default=1, ge=1, description="threads of an engine on a CPU")
    prepare_s: float | None = Field(
        default=None,
        ge=0,
        description="only with `jax`: longest time that an engine of a service takes at its start "
        "to compile the programs of usual samples, or to read them from the cache; others are "
        "compiled when a sample needs them. null = 120; 0 = none ahead, as in jobs",
    )
    tool_parser: str | None = Field(
        default=None,
        description="vLLM's parser of tool calls for `/v1/chat/completions`, such as hermes for "
        "Qwen3; null = requests with tools are refused",
    )
    vllm: dict[str, Any] = Field(
        default_factory=dict[str, Any],
        description="further arguments of vLLM's engine, for example "
        "`engine.vllm.kv_cache_dtype=fp8`; one that vLLM does not have, or that another key or the "
        "service sets, is refused",
    )

    @property
    def at_once(self) -> int:
        """Number of sequences that all engines compute at once."""
        return (self.num_engines + len(self.external)) * self.max_num_seqs

    @field_validator("vllm")
    @classmethod
    def _known_to_vllm(cls, given: dict[str, Any]) -> dict[str, Any]:
        vllm_arguments.check(given)
        return given

    @field_validator("tool_parser")
    @classmethod
    def _parses(cls, name: str | None) -> str | None:
        if name is not None:
            vllm_arguments.check_tool_parser(name)
        return name

    @model_validator(mode="after")
    def _jax_has_it(self) -> "EngineConfig":
        if self.type != "jax":
            if self.prepare_s is not None:
                raise ValueError("engine.prepare_s is of engine.type jax; leave it out")
            if self.process != "own":
                raise ValueError(
                    f"engine.process {self.process} is of engine.type jax; leave it out"
                )
            return self
        if find_spec("jax") is None:
            raise ValueError(
                "engine.type jax: the package is not installed here; "
                "pip install 'skyrl-actors[jax]'"
            )
        asked = {
            "external": bool(self.external),
            "tensor_parallel": self.tensor_parallel > 1,
            "pipeline_parallel": self.pipeline_parallel > 1,
            "tool_parser": self.tool_parser is not None,
            "enforce_eager": not self.enforce_eager,
            "vllm": bool(self.vllm),
            "in_flight keep": self.in_flight == "keep",
        }
        if odd := [name for name, is_set in asked.items() if is_set]:
            raise ValueError(
                f"engine.{odd[0]} is not available with engine.type jax; leave it out, or use "
                "engine.type vllm"
            )
        return self

    @model_validator(mode="after")
    def _some_engine(self) -> "EngineConfig":
        if not self.num_engines and not self.external:
            raise ValueError(
                "num_engines is 0 and external is empty, so nothing could sample; set one of them"
            )
        if len({each.url for each in self.external}) < len(self.external):
            raise ValueError("external names a URL twice; leave one out")
        if self.tool_parser and self.external:
            raise ValueError(
                "tool_parser: engines by URL do not return calls; leave out tool_parser or external"
            )
        return self

    def check_host(
        self, strategy: StrategyConfig, dtype: str, num_threads: int, shares: bool
    ) -> None:
        """Raise ValueError if ranks of the policy with these options cannot host the engines."""
        needs = {
            "policy.strategy of type jax": isinstance(strategy, JaxStrategy),
            "a copy of the base model on each rank: policy.strategy with fsdp=1 and tensor=1": (
                mesh_ranks(strategy) == 1
            ),
            "placement.layout colocated or mixed": shares,
            f"engine.dtype {dtype} as policy.dtype": self.dtype == dtype,
            f"engine.num_threads {num_threads} as policy.num_threads": (
                self.num_threads == num_threads
            ),
        }
        if missing := [need for need, is_met in needs.items() if not is_met]:
            raise ValueError(f"engine.process policy needs {missing[0]}; or set engine.process=own")

    def check_routes(self, device: str) -> None:
        """Raise ValueError if not all samples bring their routes, for `router_replay`."""
        advice = "set router_replay=false"
        if self.type == "jax":
            raise ValueError(
                f"router_replay: engines of type jax do not return routes; {advice}, or use "
                "engine.type vllm"
            )
        if not self.num_engines or self.external:
            raise ValueError(
                "router_replay needs the routes of all samples, and only engines of this service "
                f"return them; {advice}, or set engine.num_engines and leave out engine.external"
            )
        if self.pipeline_parallel > 1:
            raise ValueError(
                "router_replay needs one engine process that sees all layers; "
                f"{advice}, or engine.pipeline_parallel=1"
            )
        if self.vllm.get("enable_prefix_caching") is False:
            raise ValueError(
                "router_replay keeps routes by the blocks of the prefix cache; "
                f"{advice}, or leave out engine.vllm.enable_prefix_caching"
            )
        if device == "cpu" and "speculative_config" in self.vllm:
            raise ValueError(
                "router_replay does not know which speculated tokens a CPU engine rejects; "
                f"{advice}, or leave out engine.vllm.speculative_config"
            )

    @property
    def seconds_to_prepare(self) -> float:
        """The longest time to compile programs at the start of a service."""
        if self.type != "jax":
            return 0.0
        return 120.0 if self.prepare_s is None else self.prepare_s

    @property
    def topology(self) -> EngineTopology:
        return EngineTopology(
            tensor_parallel=self.tensor_parallel, pipeline_parallel=self.pipeline_parallel
        )
