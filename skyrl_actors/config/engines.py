"""Engines: how vLLM is run by this service, and vLLM servers that somebody else runs."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from skyrl_actors.config.base import FrozenConfig


class ExternalEngine(FrozenConfig):
    """A vLLM server that somebody else runs. It serves the base model and adapters, which it reads from transfer.folder."""

    url: str = Field(description="of an OpenAI-compatible vLLM server, as http://host:8000")
    model: str | None = Field(default=None, description="the base model's name there; none = the first it serves")
    api_key_env: str | None = Field(default=None, description="environment variable of the controller that has its API key")

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r}: use http://host:port or https://host:port")
        return url.rstrip("/").removesuffix("/v1")


class EngineConfig(FrozenConfig):
    num_engines: int = Field(default=1, ge=0, description="that this service runs; 0 = those of `external` only")
    external: tuple[ExternalEngine, ...] = Field(
        default=(), description="vLLM servers that sample too: [{url: http://host:8000}]; samples go to all by their load"
    )
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_model_len: int = Field(default=512, ge=8)
    max_num_seqs: int = Field(default=128, ge=1)
    max_num_batched_tokens: int = Field(default=4096, ge=8)
    tensor_parallel: int = Field(default=1, ge=1, description="devices of one node that share each layer of an engine")
    pipeline_parallel: int = Field(default=1, ge=1, description="stages of an engine's layers, each of tensor_parallel devices")
    kv_cache_bytes: int = Field(default=128 * 2**20, ge=2**20, description="bytes of KV cache on each device of an engine")
    max_loras: int = Field(default=4, ge=1, description="different adapters in one batch")
    max_logprobs: int = Field(default=20, ge=1)
    max_scored_cells: int = Field(
        default=4_000_000,
        ge=1,
        description="prompt tokens × vocabulary of a sample with target_prompt_logprobs or prompt_alt_tokens_k",
    )
    enforce_eager: bool = True
    sleep_level: Literal["auto", "1", "2"] = Field(
        default="auto", description="1 keeps weights in host memory, 2 drops them; auto drops what a full fine-tune sends again"
    )
    in_flight: Literal["drain", "keep", "abort"] = Field(
        default="drain",
        description="samples under way when training wants their devices: drain waits for them; keep freezes them, and they go on "
        "from their tokens; abort begins them anew, once each",
    )
    slice_s: float = Field(
        default=1.0,
        ge=0,
        description="with keep and abort: how long engines may sample before they give way; with keep many times what vLLM needs to compute "
        "the KV cache of the frozen samples again",
    )
    num_threads: int = Field(default=1, ge=1)
    start_timeout_s: float = Field(
        default=600.0, gt=0, description="longest an engine may take to load the base model and prove a live update of it"
    )
    call_timeout_s: float = Field(
        default=600.0, gt=0, description="longest time one sample or transfer may take, without that in which it was frozen"
    )

    @model_validator(mode="after")
    def _some_engine(self) -> "EngineConfig":
        if not self.num_engines and not self.external:
            raise ValueError("num_engines is 0 and external is empty: nothing could sample")
        if len({each.url for each in self.external}) < len(self.external):
            raise ValueError("external names a URL twice")
        return self

    @property
    def num_devices(self) -> int:
        """Of one engine."""
        return self.tensor_parallel * self.pipeline_parallel
