"""What computes: the verbs the controller calls. A backend keeps models and weights, no books about requests.

State may be lost at any time: every verb on a model may raise StateLost. The controller then waits for `ready`, restores
the model, and asks again. A `Turn` names the operation and the state it wants: a backend applies each number once, so that
asking again for the last one gives the first answer, and it is StateLost when the model is in another state.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.model import AdamParams, CheckpointForm, LossCall, ModelSpec, Role
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import LossOutput, PartialSample, SampleOutput
from skyrl_actors.messages.turn import Turn
from skyrl_actors.messages.weights import SamplerWeights

Mixture = tuple[str, float] | None  # another checkpoint, and the share of the one that is loaded


@dataclass(frozen=True, slots=True)
class AdapterMemory:
    """Host memory of each rank for the LoRA models of one role. All of them may be there at once."""

    limit_bytes: int = 2**62
    bytes_of_rank_1: int = 0  # a LoRA of rank 1 on all layers and the head: weights, gradients, moments

    def bytes_of(self, lora_rank: int) -> int:
        return lora_rank * self.bytes_of_rank_1


@dataclass(frozen=True, slots=True)
class Capabilities:
    base_model: str
    base_folder: str
    vocab_size: int
    max_context_tokens: int  # of training rows
    max_sample_tokens: int  # prompt and answer of a sample
    roles: tuple[Role, ...]
    adapts_head: bool = True  # engines sample adapters that reach the output layer
    adapters: AdapterMemory = AdapterMemory()


class Backend(Protocol):
    on_lost: Callable[[str], None]  # told the role whose ranks were made anew, without any model

    async def start(self, epoch: int) -> Capabilities:
        """Take over what an earlier controller of this service left running, and start what is missing. Calls of an
        earlier epoch are refused from now on."""
        ...

    async def ready(self, role: str) -> None:
        """Wait until the ranks of a role run. Raises InternalError, with their last words, when they keep dying."""
        ...

    async def residents(self) -> dict[str, int]:
        """The models that ranks hold, with the number of the last operation applied to each; negative when its state is not whole."""
        ...

    async def create_model(self, spec: ModelSpec, turn: Turn) -> None: ...

    async def delete_model(self, spec: ModelSpec) -> None: ...

    async def forward_backward(
        self, spec: ModelSpec, turn: Turn, columns: Columns, loss: LossCall | None, forward_only: bool
    ) -> LossOutput: ...

    async def drop_gradients(self, spec: ModelSpec, turn: Turn) -> None: ...

    async def optim_step(self, spec: ModelSpec, turn: Turn, adam: AdamParams) -> dict[str, float]: ...

    async def save_checkpoint(self, spec: ModelSpec, turn: Turn, folder: str, form: CheckpointForm, mark: str) -> None:
        """`mark` is left in the folder: who asks again knows its own."""
        ...

    async def load_checkpoint(
        self, spec: ModelSpec, turn: Turn, folder: str, with_optimizer: bool, mix: Mixture = None
    ) -> None: ...

    async def copy_state(self, spec: ModelSpec, turn: Turn) -> Any:
        """Copy weights, moments and pending gradients aside, as they are now; returns a handle for `write_state`."""
        ...

    async def write_state(self, spec: ModelSpec, handle: Any, folder: str) -> None:
        """Write that copy while training goes on."""
        ...

    async def restore(self, spec: ModelSpec, turn: Turn, folder: str) -> None:
        """Make the model from what `write_state` wrote."""
        ...

    async def renumber(self, spec: ModelSpec, turn: Turn, keep_optimizer: bool) -> None:
        """End of a fork: its state counts as operation `number`; pending gradients are dropped."""
        ...

    async def save_for_sampler(self, spec: ModelSpec, turn: Turn, version: str, written: bool = False) -> SamplerWeights:
        """Make the model's weights as they are a version, for sampling. `written`: it must outlast them."""
        ...

    async def has_sampler(self, weights: SamplerWeights) -> bool:
        """Whether what `save_for_sampler` froze is still there."""
        ...

    async def open_sampler(self, folder: str, version: str) -> SamplerWeights:
        """Weights for sampling from a checkpoint folder."""
        ...

    async def drop_sampler(self, weights: SamplerWeights) -> None: ...

    async def sample(
        self, request_id: str, prompt: tuple[int, ...], params: SamplingParams, weights: SamplerWeights
    ) -> SampleOutput:
        """Survives the death of the engine: it is run again, with the same seed."""
        ...

    async def partial(self, request_id: str, have: int, timeout_s: float) -> PartialSample:
        """Of a sample with `stream` that is on its way: what came behind its first `have` tokens."""
        ...

    def end_stream(self, request_id: str) -> None:
        """Nobody reads along any more."""
        ...

    def fault(self) -> str | None:
        """What is not there now; None while all parts live."""
        ...

    async def status(self) -> dict[str, Any]: ...

    async def detach(self) -> None:
        """Stop watching and restarting; what runs goes on, for the next controller."""
        ...

    async def close(self) -> None: ...
