"""The service as one object: base model, placement, trainer groups, engines, transfer, limits, HTTP edge.

Every choice is a tagged union; rules that span sections are checked here, before any process starts.
"""

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field, field_validator, model_validator

from skyrl_actors.config import keys
from skyrl_actors.config.base import FrozenConfig
from skyrl_actors.config.engines import EngineConfig
from skyrl_actors.config.limits import LimitsConfig
from skyrl_actors.config.observe import ObserveConfig
from skyrl_actors.config.strategies import DeepSpeedStrategy, ReplicaStrategy, StrategyConfig
from skyrl_actors.config.transfers import LogprobCheck, ShmTransfer, TransferConfig

VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class TinyBase(FrozenConfig):
    """A small Qwen3-shaped model and byte-level tokenizer, made on this machine and kept in a cache folder."""

    type: Literal["tiny"] = "tiny"
    name: str = "skyrl-actors/tiny"
    seed: int = 0
    warmup_steps: int = Field(default=150, ge=0, description="supervised steps on noisy demonstrations; 0 = random weights")
    cache_dir: Path = Path("~/.cache/skyrl-actors")


class PretrainedBase(FrozenConfig):
    """A model in Hugging Face format: a folder, or a name that huggingface_hub can resolve."""

    type: Literal["pretrained"] = "pretrained"
    name: str
    path: Path | None = None
    revision: str | None = None


BaseModelConfig = Annotated[TinyBase | PretrainedBase, Field(discriminator="type")]


class PlacementConfig(FrozenConfig):
    device: Literal["cpu", "gpu"] = "cpu"
    layout: Literal["colocated", "split", "mixed"] = Field(
        default="colocated",
        description="colocated: policy, critic and engines share devices and take turns; split: all on devices of their own; "
        "mixed: policy and engines share, the critic has its own",
    )
    colocated_share: float = Field(default=0.3, gt=0, le=0.33, description="of a slot, for each of policy, critic and engine")
    timeout_s: float = Field(default=180.0, gt=0, description="longest wait for devices")
    memory_check: Literal["refuse", "warn", "off"] = Field(
        default="refuse", description="what happens when the memory plan does not fit the devices"
    )
    memory_reserve: float = Field(default=0.08, ge=0, lt=1, description="part of a device that stays free for fragments")
    device_memory_gib: float | None = Field(
        default=None,
        gt=0,
        description="of each device; none = of the node's accelerator_type, on a CPU its part of the node's memory",
    )

    def shares(self, role: str) -> bool:
        """Whether the actors of this role share devices with others, and so take turns."""
        return self.layout == "colocated" or (self.layout == "mixed" and role != "critic")


class GroupConfig(FrozenConfig):
    """A group of training actors, one for each slot."""

    num_ranks: int = Field(default=1, ge=1)
    strategy: StrategyConfig = Field(default=ReplicaStrategy(), description="how ranks hold the frozen base under adapters")
    full_strategy: StrategyConfig | None = Field(
        default=None, description="how ranks hold a full fine-tune; none = ZeRO stage 1 on several GPUs, else replica"
    )
    dtype: Literal["float32", "bfloat16"] = "float32"
    microbatch_tokens: int = Field(default=4096, ge=1, description="tokens of one packed pass; a longer row is a pass of its own")
    share_passes: bool = Field(
        default=True,
        description="calls of several tenants that wait are computed together; False: each alone, so that a replay after a fault "
        "repeats them bit by bit and not to rounding",
    )
    activations: Literal["keep", "recompute", "offload"] = Field(
        default="keep",
        description="of a pass, until its backward: kept, computed again layer by layer, or in host memory (weights stay)",
    )
    sequence_parallel: int = Field(default=1, ge=1, description="ranks that share the tokens of a pass, for long rows")
    score_uncounted: bool = Field(
        default=True, description="answer logprobs also where the weight is 0; False: 0 there, and the head's cost is saved"
    )
    preload: bool = Field(default=True, description="load the frozen base at the start; False: with the first adapter")
    num_threads: int = Field(default=1, ge=1, description="OpenMP threads of a CPU rank")
    collective_timeout_s: float = Field(default=300.0, gt=0)
    call_timeout_s: float = Field(default=900.0, gt=0, description="longest time one verb may take on a rank")

    @model_validator(mode="after")
    def _can_be_held(self) -> "GroupConfig":
        if self.num_ranks % self.sequence_parallel:
            raise ValueError(f"sequence_parallel {self.sequence_parallel} does not divide num_ranks {self.num_ranks}")
        zero = [s for s in (self.strategy, self.full_strategy) if isinstance(s, DeepSpeedStrategy)]
        if self.sequence_parallel > 1 and zero:
            raise ValueError("sequence_parallel is for the strategies replica and fsdp2, not for deepspeed")
        return self

    def full_strategy_on(self, device: str) -> StrategyConfig:
        """The one that is meant when none is named."""
        if self.full_strategy is not None:
            return self.full_strategy
        many_gpus = device == "gpu" and self.num_ranks > 1 and self.sequence_parallel == 1
        return DeepSpeedStrategy() if many_gpus else ReplicaStrategy()


class LoraConfig(FrozenConfig):
    max_rank: int = 32
    alpha: float = Field(default=32.0, gt=0)
    external: Literal["adapter", "merged"] = Field(
        default="adapter",
        description="what save_weights_external writes: the adapter in peft's format, or the base with it merged in",
    )
    max_adapters: int = Field(
        default=8, ge=1, description="LoRA models on the device at once, in each role; idle ones wait in host memory"
    )
    max_host_gib: float | None = Field(
        default=None,
        gt=0,
        description="host memory of each rank for all LoRA models of a role; one more waits until there is room. "
        "none = an eighth of a device's part of its node's memory",
    )
    max_full_models: int = Field(default=1, ge=0, description="full fine-tunes alive at once, in each role")

    @model_validator(mode="after")
    def _engine_takes_rank(self) -> "LoraConfig":
        if self.max_rank not in VLLM_LORA_RANKS:
            raise ValueError(f"max_rank {self.max_rank}: vLLM serves adapters of at most one of {VLLM_LORA_RANKS}")
        return self


class JournalConfig(FrozenConfig):
    """What was promised and answered, across restarts. `serve` with the same journal goes on where it was."""

    folder: Path = Field(default=Path("journal"), description="payloads, results and snapshots; with SQLite its database too")
    url: str | None = Field(default=None, description="postgresql://user:password@host/database; none = SQLite in the folder")
    snapshot_operations: int = Field(default=64, ge=1, description="snapshot a model after so many operations")
    snapshot_s: float = Field(default=60.0, gt=0, description="or when its last snapshot is older and something was trained")
    snapshot_bytes: int = Field(default=256 * 2**20, ge=1, description="or when the operations behind it have so many bytes")
    keep_snapshots: int = Field(default=3, ge=2, description="of each model; an older one serves when a newer one is damaged")
    retention_s: float = Field(default=24 * 3600.0, gt=0, description="how far back a model can be rebuilt, and answers be read")
    sweep_s: float = Field(default=300.0, gt=0, description="how often what retention no longer asks for is removed")

    @field_validator("url")
    @classmethod
    def _known_database(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("postgresql://", "postgresql+psycopg://", "postgres://")):
            raise ValueError("use postgresql://user:password@host/database, or leave it out for SQLite in journal.folder")
        return url


class RestartConfig(FrozenConfig):
    """What happens when a process dies or does not answer in time."""

    max_in_a_row: int = Field(default=5, ge=0, description="restarts of a part without one success between them; then it fails")
    backoff_s: float = Field(default=0.5, ge=0, description="wait before the second restart in a row; doubles each time")
    max_backoff_s: float = Field(default=30.0, ge=0)
    start_timeout_s: float = Field(default=180.0, gt=0, description="longest a restarted group may take to load the base model")
    cooldown_s: float = Field(default=60.0, ge=0, description="a part that failed is tried again when it is asked for after this")
    standbys: int = Field(
        default=1, ge=0, description="training processes kept waiting on a CPU service, to take the place of a dead rank at once"
    )
    attempts: int = Field(default=4, ge=1, description="times one operation is tried when its ranks die under it")


class SdkFlags(FrozenConfig):
    """What SDKs are told of how to speak to this service, under the protocol's own names."""

    parallel_fwdbwd_chunks: bool = Field(default=False, description="chunks of one batch at once; here they are computed in turn")
    proto_compress_fwdbwd: bool = Field(default=False, description="zstd bodies, for slow networks")
    proto_write_fwdbwd: bool = Field(default=False, description="protobuf bodies from SDK 0.22.7 to 0.24 too")
    fwd_via_fwdbwd: bool = Field(default=False, description="the same for forward")
    create_model_via_load_weights: bool = Field(
        default=False, description="one request for a model from a checkpoint, SDK 0.24.1 on"
    )
    sample_use_retrieve_futures: bool = Field(default=False, description="one poll for all samples of a sampler")
    sample_join_sampling_session: bool = Field(default=False, description="copies of a sampling client ask for their number")
    sample_cancel_enabled: bool = Field(default=True, description="samples whose answer nobody waits for are ended")
    custom_loss_server_side: bool = Field(default=False, description="losses traced by create_custom_loss are run by the workers")
    use_pyqwest_transport: bool = True


class HttpConfig(FrozenConfig):
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    public_url: str | None = Field(
        default=None,
        pattern=r"^https?://[^/?#@\s]+(/[^?#\s]*)?$",
        description="where clients reach the service when that is not host and port, as https://rl.example.com behind a proxy; "
        "links to checkpoints begin with it",
    )
    replicas: int = Field(default=2, ge=1, description="ingress processes; with two, one may die unnoticed")
    max_replicas: int | None = Field(
        default=None, ge=1, description="Serve adds ingress processes up to so many as requests come; none = always `replicas`"
    )
    long_poll_s: float = Field(default=30.0, gt=0, le=40)
    api_keys: tuple[str, ...] = Field(
        default=(), description="allowed X-API-Key values as [name=]key or [name=]sha256:<hex>, kept as hashes; none = any key"
    )
    api_keys_file: Path | None = Field(default=None, description="the same, one a line")
    tokens: bool = Field(default=False, description="SDKs change their key for a token that ends (their flag pjwt_auth_enabled)")
    open_to_network: bool = Field(default=False, description="listen beyond this machine although no API keys are set")
    tempered_logprobs: bool = Field(
        default=False,
        description="samples are answered with logprobs at their own temperature instead of 1; a request may say itself",
    )
    sdk: SdkFlags = SdkFlags()
    console: bool = Field(default=True, description="a read-only page at /; with API keys, who gives none sees totals only")
    runs: Path | None = Field(default=Path("runs"), description="folder of jobs' runs that the console shows")
    haproxy: bool = Field(default=True, description="Ray Serve's HAProxy edge instead of its Python proxy")

    @model_validator(mode="after")
    def _grows(self) -> "HttpConfig":
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas {self.max_replicas} is below replicas {self.replicas}")
        if not self.console and self.runs not in (None, Path("runs")):
            raise ValueError(f"runs {self.runs} is shown by the console alone, and console is false")
        return self

    @model_validator(mode="before")
    @classmethod
    def _with_keys_of_file(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        content = cast("dict[str, Any]", data)
        file = content.get("api_keys_file")
        if file is None:
            return content
        try:
            found = keys.entries_in(Path(file).expanduser().read_text())
        except OSError as error:
            raise ValueError(f"api_keys_file {file}: {error.strerror}") from None
        if not found:
            raise ValueError(f"api_keys_file {file} has no key; write one [name=]key a line")
        return content | {"api_keys": [*(content.get("api_keys") or ()), *found]}

    @field_validator("api_keys")
    @classmethod
    def _hashed(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(keys.hashed(entry) for entry in entries))

    @model_validator(mode="after")
    def _network_needs_keys(self) -> "HttpConfig":
        if not (_is_loopback(self.host) or self.api_keys or self.open_to_network):
            raise ValueError(
                f"host {self.host} is open to the network and api_keys is empty: anybody could use the service. Set "
                "http.api_keys=[tml-…], http.api_keys_file or SKYRL_ACTORS_API_KEYS, or http.open_to_network=true if that is meant"
            )
        return self


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ClusterConfig(FrozenConfig):
    """Everything `serve` starts."""

    name: str = Field(default="skyrl-actors", pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,40}$")
    base_model: BaseModelConfig = TinyBase()
    placement: PlacementConfig = PlacementConfig()
    policy: GroupConfig = GroupConfig()
    critic: GroupConfig | None = GroupConfig()
    engine: EngineConfig = EngineConfig()
    lora: LoraConfig = LoraConfig()
    transfer: TransferConfig = ShmTransfer()
    logprob_check: LogprobCheck = LogprobCheck()
    limits: LimitsConfig = LimitsConfig()
    http: HttpConfig = HttpConfig()
    journal: JournalConfig = JournalConfig()
    restart: RestartConfig = RestartConfig()
    observe: ObserveConfig = ObserveConfig()
    checkpoint_dir: Path = Path("checkpoints")
    checkpoint_mirror: str | None = Field(
        default=None,
        pattern=r"^[a-z0-9]+://",
        description="a second place for checkpoints, by fsspec: s3://bucket/folder, gs://…, file://…; "
        "written before a checkpoint is answered, and read from when the service starts without them",
    )

    @property
    def engine_adapters(self) -> int:
        """That an engine keeps in host memory; it reads others again from their files."""
        return max(4 * self.lora.max_adapters, self.engine.max_loras)

    @property
    def logprob_bound(self) -> float:
        exact = self.policy.dtype == self.engine.dtype == "float32"
        return self.logprob_check.bound or (1e-4 if exact else 0.05)

    @model_validator(mode="after")
    def _full_fine_tunes_can_be_held(self) -> "ClusterConfig":
        for group in (self.policy, self.critic):
            if group is not None and self.lora.max_full_models:
                group.full_strategy_on(self.placement.device)  # the default one may not be installed
        on_gpus_together = self.placement.device == "gpu" and self.placement.layout != "split"
        for role, group in (("policy", self.policy), ("critic", self.critic)):
            if (
                group
                and on_gpus_together
                and self.placement.shares(role)
                and isinstance(group.strategy, DeepSpeedStrategy)
                and group.strategy.stage == 3
            ):
                raise ValueError(
                    f"{role}.strategy deepspeed stage 3: a frozen base under it does not leave the device for the engines; "
                    "use fsdp2 or replica, or placement.layout=split"
                )
        return self

    @model_validator(mode="after")
    def _transfer_reaches(self) -> "ClusterConfig":
        kind, place = self.transfer.type, self.placement
        if kind == "nccl" and place.device == "cpu":
            raise ValueError("transfer.type nccl needs GPUs; on a CPU use shm on one host, else gloo or object_store")
        if kind == "nccl" and place.shares("policy"):
            raise ValueError(
                f"transfer.type nccl can not join two processes on one GPU, and layout {place.layout} puts trainers and engines "
                "there; use shm, gloo or object_store, or placement.layout=split"
            )
        if kind == "ipc" and place.device == "cpu":
            raise ValueError("transfer.type ipc shares a GPU's memory; on a CPU use shm")
        if kind == "ipc" and not place.shares("policy"):
            raise ValueError(
                f"transfer.type ipc shares a GPU's memory, and layout {place.layout} gives trainers and engines GPUs of their own; use nccl"
            )
        if kind == "ipc" and self.engine.num_devices > 1:
            raise ValueError(
                f"transfer.type ipc is for engines of one device, and here each has {self.engine.num_devices}; use shm"
            )
        if self.engine.external and kind not in ("shm", "disk", "lora"):
            raise ValueError(
                f"transfer.type {kind} does not reach engine.external, which read adapters from a folder that they share; use disk "
                "or lora, or shm on one host"
            )
        if kind == "lora" and self.lora.max_full_models:
            raise ValueError(
                f"transfer.type lora moves adapters only and lora.max_full_models is {self.lora.max_full_models}; "
                "set it to 0, or use another transfer"
            )
        return self

    @model_validator(mode="after")
    def _in_flight_can_be(self) -> "ClusterConfig":
        engine = self.engine
        if engine.in_flight != "drain" and not self.placement.shares("engine"):
            raise ValueError(
                f"engine.in_flight {engine.in_flight} says what becomes of samples when training wants their devices; in layout "
                f"{self.placement.layout} engines have their own: leave it out"
            )
        if not engine.num_engines and (engine.in_flight != "drain" or engine.sleep_level != "auto"):
            raise ValueError(
                "engine.in_flight and engine.sleep_level are for engines of this service, and engine.num_engines is 0"
            )
        if engine.in_flight == "keep" and engine.sleep_level == "2":
            raise ValueError("engine.in_flight keep needs the weights that samples began with, and sleep_level 2 drops them")
        return self

    @model_validator(mode="after")
    def _slots_agree(self) -> "ClusterConfig":
        engine = self.engine
        slots = engine.num_engines * engine.num_devices
        for role, group in (("policy", self.policy), ("critic", self.critic)):
            if group is not None and slots and self.placement.shares(role) and group.num_ranks != slots:
                times = f" × {engine.num_devices} devices = {slots}" if engine.num_devices > 1 else ""
                raise ValueError(
                    f"{self.placement.layout} layout: {role}.num_ranks is {group.num_ranks} and engine.num_engines is "
                    f"{engine.num_engines}{times}; they share slots one to one, so make them equal or set placement.layout=split"
                )
        return self
