"""What a training rank offers, without torch: the groups call these methods on actors.

All methods are collective: every rank of a group gets the same calls in the same order. Only rows differ.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.config.strategies import ReplicaStrategy, StrategyConfig
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.model import AdamParams, CheckpointForm, LossCall, ModelSpec, Role
from skyrl_actors.messages.weights import Freeze, WeightManifest, WeightStream

TORN = -1  # in the place of an operation's number: the state is not whole
Part = Literal["weights", "gradients", "optimizer"]
Activations = Literal["keep", "recompute", "offload"]


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """All a rank needs to start."""

    role: Role
    rank: int
    world_size: int
    base_folder: str
    dtype: str
    device: Literal["cpu", "gpu"]
    num_threads: int
    microbatch_tokens: int
    collective_timeout_s: float
    strategy: StrategyConfig = field(default_factory=ReplicaStrategy)  # of the frozen base under adapters
    full_strategy: StrategyConfig = field(default_factory=ReplicaStrategy)  # of full fine-tunes
    activations: Activations = "keep"
    sequence_parallel: int = 1
    score_uncounted: bool = True
    preload: bool = True
    export_dtype: str = "float32"  # of full weights on their way to engines
    max_adapters: int = 8  # on the device at once


@dataclass(frozen=True, slots=True)
class BaseModelInfo:
    num_parameters: int
    vocab_size: int
    max_context_tokens: int
    hidden_size: int = 0


@dataclass(frozen=True, slots=True)
class PartCall:
    """One model's share of a forward_backward on one rank."""

    model_id: str
    rows: tuple[int, ...]
    columns: Columns
    loss: LossCall | None  # None: a critic's plain forward


@dataclass(frozen=True, slots=True)
class Refused:
    """A part that was not computed. `clean`: its model is as it was before the call."""

    error: InvalidRequest
    clean: bool


@dataclass(frozen=True, slots=True)
class RowOutput:
    """One rank's share: `rows` as given, `values` [Σ lengths of rows] or [Σ lengths of rows, K] float32 in that order, `sums`
    over the rows."""

    rows: tuple[int, ...]
    field: str  # "logprobs" or "values"
    values: NDArray[np.float32]
    elementwise: NDArray[np.float32]  # [same], the loss of each token
    sums: dict[str, float]
    compute_s: float


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What a rank says of itself to a controller that takes it over."""

    spec: WorkerSpec | None  # None: it waits to become a rank
    info: BaseModelInfo | None  # None before `setup`
    applied: dict[str, int]  # model id -> the last operation applied to its state, TORN when that broke off
    pid: int
    log_file: str  # where its last words are, on its own machine


class TrainWorker(Protocol):
    def rendezvous(self) -> int:
        """A free port on this rank's machine, for the process group."""
        ...

    def setup(self, address: str, port: int) -> BaseModelInfo: ...

    def create_model(self, spec: ModelSpec) -> int:
        """Returns the number of trained parameters."""
        ...

    def delete_model(self, model_id: str) -> None: ...

    def forward_backward(self, calls: tuple[PartCall, ...], forward_only: bool) -> list[RowOutput | Refused]:
        """Of one or several models, small ones together in a pass. Adds the gradients of the summed losses to the pending ones
        of each model, unless `forward_only`."""
        ...

    def drop_gradients(self, model_id: str) -> None: ...

    def optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]: ...

    def save_checkpoint(
        self, model_id: str, folder: str, form: CheckpointForm, mark: str, notes: Mapping[str, str] | None = None
    ) -> None:
        """`mark` says who asked; `notes`: texts that are kept beside the weights, by name of file."""
        ...

    def load_checkpoint(self, model_id: str, folder: str, with_optimizer: bool, mixed: tuple[str, float] | None = None) -> None:
        """`mixed`: the folder of another checkpoint, and which share `folder` has of the weights; the rest is the other's."""
        ...

    def export_weights(
        self, model_id: str, path: str, version: str, checksums: bool, freeze: Freeze = "always", shards: bool = False
    ) -> WeightManifest | None:
        """Rank 0 answers, and writes unless full weights may be read from where they are: with `freeze` when_needed those that each rank
        holds whole, with `shards` also others. The other ranks answer None."""
        ...

    def write_versions(self, model_id: str, needless: Collection[str]) -> list[str]:
        """The weights are about to change: write the versions that they still are, but for `needless`; returns those written. Nothing
        to do on a rank that does not hold the model."""
        ...

    def copy_state(self, model_id: str) -> int:
        """Copy weights, moments and pending gradients aside; returns a handle."""
        ...

    def write_state(self, handle: int, folder: str) -> None:
        """Write that copy: rank 0 weights and moments, each rank its own share of the pending gradients."""
        ...

    def restore_state(self, spec: ModelSpec, folder: str) -> int:
        """Make the model from such files, under any number of ranks."""
        ...

    def renumber(self, model_id: str, keep_optimizer: bool) -> None:
        """End of a fork: pending gradients go, and the moments unless they are kept."""
        ...

    def exists(self, path: str) -> bool:
        """Whether something that this rank exported is still there: as a file, or as the weights of a model."""
        ...

    def read_files(self, path: str) -> dict[str, bytes]:
        """A file (under the key "") or the files of a folder that this rank exported."""
        ...

    def open_stream(self, manifest: WeightManifest, stream: WeightStream) -> WeightStream:
        """Begin to send a version to the workers that will join; answers where, with the port that was free. Raises WeightsGone
        when it was not written and the weights have changed."""
        ...

    def feed(self, version: str, stream_id: str) -> None:
        """On every rank, right behind `open_stream` on one: gather what ranks hold in shards for the one that sends. Nothing to do for
        other versions."""
        ...

    def write_probe(self, path: str, content: str) -> None: ...

    def discard_export(self, path: str) -> None:
        """On every rank: a version of no use any more."""
        ...

    def move(self, parts: tuple[Part, ...], to: Literal["device", "host"]) -> int: ...
