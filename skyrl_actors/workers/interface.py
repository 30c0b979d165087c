"""The interface of a training rank, without torch. Groups call these methods on actors.

All methods are collective: every rank of a group gets the same calls in the same order. Only the
rows differ.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.config.strategies import (
    JaxStrategy,
    ReplicaStrategy,
    StrategyConfig,
    mesh_ranks,
)
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.device_usage import DeviceUsage
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.model import AdamParams, CheckpointForm, LossCall, ModelSpec, Role
from skyrl_actors.messages.weights import Materialize, WeightManifest, WeightStream
from skyrl_actors.transport.handshake import PROTOCOL_VERSION

TORN = -1  # instead of an operation's number: the state is incomplete
MemoryPart = Literal["weights", "gradients", "optimizer"]
Activations = Literal["keep", "recompute", "offload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """All that a rank needs to start."""

    role: Role
    rank: int
    world_size: int
    base_folder: str
    dtype: str
    device: Literal["cpu", "gpu"]
    num_threads: int
    microbatch_tokens: int
    collective_timeout_s: float
    strategy: StrategyConfig = field(default_factory=ReplicaStrategy)  # frozen base of adapters
    full_strategy: StrategyConfig = field(default_factory=ReplicaStrategy)  # full fine-tunes
    activations: Activations = "keep"
    sequence_parallel: int = 1
    score_uncounted: bool = True
    preload: bool = True
    export_dtype: str = "float32"  # of full weights that are sent to engines
    max_adapters: int = 8  # of `max_rank` on the device at once
    max_rank: int = 32
    environment: tuple[tuple[str, str], ...] = ()  # the config's; a rank with others is restarted
    router_replay: bool = False  # requests can bring the experts of their tokens
    hosts_engine: bool = False  # in its process; one of another class is restarted

    @property
    def mesh_ranks(self) -> int:
        """The number of ranks that share a JAX mesh; 1 for other strategies."""
        return mesh_ranks(self.strategy)

    @property
    def adapter_room(self) -> int:
        """The most that the ranks of the adapters on the device add up to."""
        return self.max_adapters * self.max_rank

    def room_of(self, lora_rank: int) -> int:
        """Return the part of `adapter_room` of one adapter.

        JAX keeps whole places, because it pads the adapters of a pass to one rank.
        """
        return self.max_rank if isinstance(self.strategy, JaxStrategy) else lora_rank

    @property
    def ranks_of_rows(self) -> int:
        """The number of consecutive ranks that get the same rows."""
        return self.sequence_parallel * self.mesh_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModelInfo:
    """Facts about the base model that come from its files."""

    num_parameters: int
    vocab_size: int
    max_context_tokens: int
    hidden_size: int = 0


@dataclass(frozen=True, slots=True)
class CopiedState:
    """A copy of a model's state that a rank keeps until `write_state`."""

    handle: int
    seconds: float  # that the copy took; the rank did nothing else


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCall:
    """One model's share of a forward_backward on one rank."""

    model_id: str
    rows: tuple[int, ...]
    columns: Columns
    loss: LossCall | None  # None: a critic's plain forward


@dataclass(frozen=True, slots=True)
class Refused:
    """A part that was not computed. With `clean`, the state of its model is unchanged."""

    error: InvalidRequest
    clean: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOutput:
    """The results of one rank for its rows.

    `values` are float32 [Σ lengths of rows] or [Σ lengths of rows, K], in the order of `rows`.
    `sums` are over the rows.
    """

    rows: tuple[int, ...]
    field: str  # "logprobs" or "values"
    values: NDArray[np.float32]
    elementwise: NDArray[np.float32]  # the loss of each token, in the shape of `values`
    sums: dict[str, float]
    compute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """What a rank reports to a controller that attaches to it."""

    spec: WorkerSpec | None  # None: a standby process
    info: BaseModelInfo | None  # None before `setup`
    applied: dict[str, int]  # by model id: the last operation applied, TORN when it failed midway
    pid: int
    log_file: str  # on the machine of the rank
    protocol: int = PROTOCOL_VERSION  # of its process; one of another version is not taken over

    @property
    def is_of_this_version(self) -> bool:
        """Whether its process speaks this version's protocol. Older ones do not send theirs."""
        return getattr(self, "protocol", None) == PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUsage:
    """Memory of a rank, and the code that it computes with, which depends on its device."""

    rss_bytes: int
    devices: tuple[DeviceUsage, ...]
    paths: dict[str, str]  # "attention", "head", "optimizers" -> what is used


class TrainWorker(Protocol):
    """One rank of a training group."""

    def paths(self) -> dict[str, str]:
        """Return what this rank computes with. Other threads may call it at any time."""
        ...

    def rendezvous(self) -> int:
        """Return a free port on this rank's machine, for the process group."""
        ...

    def setup(self, address: str, port: int) -> BaseModelInfo: ...

    def create_model(self, spec: ModelSpec) -> int:
        """Create a model and return the number of trained parameters."""
        ...

    def delete_model(self, model_id: str) -> None: ...

    def forward_backward(
        self, calls: tuple[PartCall, ...], forward_only: bool
    ) -> list[RowOutput | Refused]:
        """Compute parts of one or several models; small ones share a pass.

        Unless `forward_only`, the gradients of the summed losses are added to the pending gradients
        of each model.
        """
        ...

    def drop_gradients(self, model_id: str) -> None: ...

    def optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]: ...

    def save_checkpoint(
        self,
        model_id: str,
        folder: str,
        form: CheckpointForm,
        mark: str,
        notes: Mapping[str, str] | None = None,
    ) -> None:
        """Save a checkpoint. `mark` identifies the request; `notes` are texts by file name."""
        ...

    def load_checkpoint(
        self,
        model_id: str,
        folder: str,
        with_optimizer: bool,
        mixed: tuple[str, float] | None = None,
    ) -> None:
        """Load a checkpoint.

        `mixed` is a second folder, and the share of the weights that comes from `folder`.
        """
        ...

    def export_weights(
        self,
        model_id: str,
        path: str,
        version: str,
        checksums: bool,
        materialize: Materialize = "eager",
    ) -> WeightManifest | None:
        """Export a version of the weights. Rank 0 returns the manifest, other ranks return None.

        Rank 0 writes the version. It does not write full weights with `materialize` lazy, which
        engines get from the live weights.
        """
        ...

    def write_versions(self, model_id: str, needless: Collection[str]) -> list[str]:
        """Write the unwritten live versions before the weights change, except `needless`.

        Returns the versions written. A rank that does not hold the model does nothing.
        """
        ...

    def copy_state(self, model_id: str) -> CopiedState:
        """Copy weights, moments and pending gradients to host memory.

        Where the state is sharded, each rank copies its pieces. Sharded gradients are not copied:
        such a model is copied between steps only.
        """
        ...

    def write_state(self, handle: int, folder: str) -> None:
        """Write a copy of `copy_state`.

        Rank 0 writes weights and moments that every rank holds, each rank its pieces of sharded
        ones and its share of the pending gradients.
        """
        ...

    def restore_state(self, spec: ModelSpec, folder: str) -> int:
        """Create the model from the files of `write_state`, under any number of ranks."""
        ...

    def renumber(self, model_id: str, keep_optimizer: bool) -> None:
        """End a fork: drop the pending gradients, and the moments unless they are kept."""
        ...

    def exists(self, path: str) -> bool:
        """Return whether an export still exists, as a file or as the live weights of a model."""
        ...

    def read_files(self, path: str) -> dict[str, NDArray[np.uint8]]:
        """Return an exported file (under the key "") or the files of an exported folder.

        The arrays map the files, so that nothing is copied here.
        """
        ...

    def open_stream(self, manifest: WeightManifest, stream: WeightStream) -> WeightStream:
        """Start to send a version to the workers that will join.

        Returns the address, with the port that was free. Raises WeightsGone when the version was
        not written and the weights have changed.
        """
        ...

    def feed(self, version: str, stream_ids: tuple[str, ...], everywhere: bool = False) -> None:
        """Gather sharded weights once for the ranks that send them.

        Every rank calls this directly after `open_stream`, which ran on rank 0 or, with
        `everywhere`, on any ranks. Versions that need no gathering are skipped.
        """
        ...

    def write_probe(self, path: str, content: str) -> None: ...

    def discard_export(self, path: str) -> None:
        """Delete an export that is no longer needed, on every rank."""
        ...

    def move(self, parts: tuple[MemoryPart, ...], to: Literal["device", "host"]) -> int: ...
