"""The backend protocol: the calls with which the controller computes.

A backend keeps models and weights. It keeps no records of requests.

State may be lost at any time, so every call on a model may raise StateLost. The controller then
waits for `ready`, restores the model, and repeats the call. An `OpPrecondition` names the operation
and the model state that it expects. A backend applies each operation number once: repeating the
last number returns the first answer, and a model in another state raises StateLost.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.image_form import ImageForm
from skyrl_actors.messages.images import Picture
from skyrl_actors.messages.model import AdamParams, CheckpointForm, LossCall, ModelSpec, Role
from skyrl_actors.messages.precondition import OpPrecondition
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import LossOutput, PartialSample, SampleOutput
from skyrl_actors.messages.weights import SamplerWeights

Mixture = tuple[str, float] | None  # path of another checkpoint, and the weight of the loaded one


@dataclass(frozen=True, slots=True)
class AdapterMemory:
    """Host memory of each rank for all LoRA models of one role together."""

    limit_bytes: int = 2**62
    bytes_of_rank_1: int = 0  # weights, gradients and moments of a rank-1 LoRA on all layers + head

    def bytes_of(self, lora_rank: int) -> int:
        return lora_rank * self.bytes_of_rank_1


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What the started backend serves of one base model."""

    base_model: str
    base_folder: str
    vocab_size: int
    max_context_tokens: int  # of a training row
    max_sample_tokens: int  # of a sample: prompt and answer
    roles: tuple[Role, ...]
    adapts_head: bool = True  # engines take adapters on the output layer
    adapters: AdapterMemory = AdapterMemory()
    images: ImageForm | None = None  # None: the base model takes none


@dataclass(frozen=True, slots=True)
class ServedModels:
    """The base models of a service. The first is the default."""

    bases: tuple[Capabilities, ...]

    @property
    def default(self) -> Capabilities:
        return self.bases[0]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(base.base_model for base in self.bases)

    @property
    def take_images(self) -> bool:
        """Whether any base model takes images."""
        return any(base.images is not None for base in self.bases)

    @property
    def max_sample_tokens(self) -> int:
        """The length of the longest sample of any base model."""
        return max(base.max_sample_tokens for base in self.bases)

    def of(self, base_model: str) -> Capabilities:
        """Return a base model by name; "" means the default. Raises InvalidRequest."""
        if not base_model:
            return self.default
        for base in self.bases:
            if base.base_model == base_model:
                return base
        raise InvalidRequest(
            f"unknown base model {base_model!r}; this service has "
            f"{', '.join(repr(name) for name in self.names)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendCopy:
    """A copy of a model's state that waits to be written."""

    handle: Any  # the backend's own
    seconds: float  # that the copy took; the model could not train


class Backend(Protocol):
    """All calls of the controller on the parts that compute."""

    # Called with base model and role whose ranks restarted without any model.
    on_lost: Callable[[str, str], None]

    @property
    def lost(self) -> str | None:
        """Why the backend must be closed and started again. None if it can repair itself."""
        ...

    async def stand_by(self) -> None:
        """Look for what runs until cancelled, so that `start` can do without Ray's server.

        A controller awaits this while another one is active.
        """
        ...

    async def start(self, epoch: int) -> ServedModels:
        """Take over what an earlier controller of this service left, and start what is missing.

        Calls of an earlier epoch are refused from now on.
        """
        ...

    async def ready(self, spec: ModelSpec) -> None:
        """Wait until the ranks of a model's base and role run.

        Raises InternalError, with the ranks' last log lines, when they keep dying.
        """
        ...

    def holding(self, base_model: str) -> AbstractAsyncContextManager[None]:
        """Return a context in which this task's calls on a base model do not wait for others."""
        ...

    async def residents(self) -> dict[str, int]:
        """Return the models that ranks hold, with the last operation number applied to each.

        The number is negative if the model's state is incomplete.
        """
        ...

    def runs(self, base_model: str) -> bool:
        """Return whether a base model has processes. Without them its models wait for a request."""
        ...

    async def create_model(self, spec: ModelSpec, precondition: OpPrecondition) -> None: ...

    async def delete_model(self, spec: ModelSpec) -> None: ...

    async def forward_backward(
        self,
        spec: ModelSpec,
        precondition: OpPrecondition,
        columns: Columns,
        loss: LossCall | None,
        forward_only: bool,
        weight: float = 1.0,
    ) -> LossOutput:
        """Compute a loss. `weight` is that of the model's tenant, for the order of calls."""
        ...

    async def drop_gradients(self, spec: ModelSpec, precondition: OpPrecondition) -> None: ...

    async def optim_step(
        self, spec: ModelSpec, precondition: OpPrecondition, adam: AdamParams
    ) -> dict[str, float]: ...

    async def save_checkpoint(
        self,
        spec: ModelSpec,
        precondition: OpPrecondition,
        folder: str,
        form: CheckpointForm,
        mark: str,
    ) -> None:
        """Save a checkpoint. `mark` goes into the folder and identifies this save on a retry."""
        ...

    async def load_checkpoint(
        self,
        spec: ModelSpec,
        precondition: OpPrecondition,
        folder: str,
        with_optimizer: bool,
        mix: Mixture = None,
    ) -> None: ...

    async def copy_state(self, spec: ModelSpec, precondition: OpPrecondition) -> BackendCopy:
        """Copy weights, moments and pending gradients."""
        ...

    async def write_state(self, spec: ModelSpec, copy: BackendCopy, folder: str) -> None:
        """Write the copy while training continues."""
        ...

    async def restore(self, spec: ModelSpec, precondition: OpPrecondition, folder: str) -> None:
        """Create the model from what `write_state` wrote."""
        ...

    async def renumber(
        self, spec: ModelSpec, precondition: OpPrecondition, keep_optimizer: bool
    ) -> None:
        """End a fork: the state now counts as this operation; pending gradients are dropped."""
        ...

    async def save_for_sampler(
        self, spec: ModelSpec, precondition: OpPrecondition, version: str, written: bool = False
    ) -> SamplerWeights:
        """Publish the model's current weights as a version for sampling.

        `written`: write the version at once, because it must outlast the live weights.
        """
        ...

    async def has_sampler(self, weights: SamplerWeights) -> bool:
        """Return whether the version that `save_for_sampler` published still exists."""
        ...

    async def open_sampler(self, base_model: str, folder: str, version: str) -> SamplerWeights:
        """Open weights for sampling from a checkpoint folder."""
        ...

    async def drop_sampler(self, weights: SamplerWeights) -> None: ...

    def unfreed(self) -> list[SamplerWeights]:
        """Return dropped versions whose files may still be there. They are freed later."""
        ...

    async def sample(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        weights: SamplerWeights,
        pictures: tuple[Picture, ...] = (),
    ) -> SampleOutput:
        """Sample once.

        Raises StateLost when the engine dies, PartDown when nothing was begun, and WeightsGone when
        the version's files are missing. The caller repeats the call, with the same seed.
        """
        ...

    async def partial(self, request_id: str, have: int, timeout_s: float) -> PartialSample:
        """Return what came of a running streamed sample after its first `have` tokens."""
        ...

    def end_stream(self, request_id: str) -> None:
        """Forget a stream: its sample has ended, or its client has stopped reading."""
        ...

    def fault(self) -> str | None:
        """Return what cannot be served now; None while all parts are alive."""
        ...

    def waiting(self, base_model: str, request_id: str = "") -> str | None:
        """Return why requests of this base model wait for the devices, or None.

        `request_id`: of a sample that may run.
        """
        ...

    async def status(self) -> dict[str, Any]: ...

    async def detach(self) -> None:
        """Stop supervision and restarts; the parts keep running for the next controller."""
        ...

    async def close(self) -> None: ...
