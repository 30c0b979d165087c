"""What computes: the verbs the controller calls. A backend keeps models and weights, no books about requests."""

from dataclasses import dataclass
from typing import Any, Protocol

from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.model import AdamParams, LossCall, ModelSpec
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import LossOutput, SampleOutput
from skyrl_actors.messages.weights import SamplerWeights


@dataclass(frozen=True, slots=True)
class Capabilities:
    base_model: str
    base_folder: str
    vocab_size: int
    max_context_tokens: int  # of training rows
    max_sample_tokens: int  # prompt and answer of a sample
    roles: tuple[str, ...]


class Backend(Protocol):
    async def start(self) -> Capabilities: ...

    async def create_model(self, spec: ModelSpec) -> None: ...

    async def delete_model(self, model_id: str) -> None: ...

    async def forward_backward(
        self, model_id: str, columns: Columns, loss: LossCall | None, forward_only: bool
    ) -> LossOutput: ...

    async def drop_gradients(self, model_id: str) -> None: ...

    async def optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]: ...

    async def save_checkpoint(self, model_id: str, folder: str, with_optimizer: bool) -> None: ...

    async def load_checkpoint(self, model_id: str, folder: str, with_optimizer: bool) -> None: ...

    async def save_for_sampler(self, model_id: str, version: str) -> SamplerWeights:
        """Freeze the model's weights as they are, for sampling."""
        ...

    async def open_sampler(self, folder: str, version: str) -> SamplerWeights:
        """Weights for sampling from a checkpoint folder."""
        ...

    async def drop_sampler(self, weights: SamplerWeights) -> None: ...

    async def sample(
        self, request_id: str, prompt: tuple[int, ...], params: SamplingParams, weights: SamplerWeights
    ) -> SampleOutput: ...

    def fault(self) -> str | None:
        """Why nothing can be computed any more; None while all parts live."""
        ...

    async def status(self) -> dict[str, Any]: ...

    async def close(self) -> None: ...
