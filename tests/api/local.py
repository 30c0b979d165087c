"""The HTTP application with the real controller and journal behind it and a backend in memory: all but Ray, torch and vLLM.

python -m tests.api.local PORT FOLDER
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

from skyrl_actors.api.app import build_app
from skyrl_actors.api.client import ControllerClient
from skyrl_actors.api.state import ApiState
from skyrl_actors.config.cluster import ClusterConfig, JournalConfig, LoraConfig, TinyBase
from skyrl_actors.controller.controller import Controller
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.model import LossCall, ModelSpec
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import LossOutput, SampleOutput, Sequence
from skyrl_actors.messages.sampling import PromptAlternatives, TargetLogprobs
from skyrl_actors.messages.turn import Turn
from skyrl_actors.messages.weights import SamplerWeights
from tests.fakes import FakeBackend

MODEL = "Qwen/Qwen3-8B"


class AnsweringBackend(FakeBackend):
    """Answers of the right shapes: logprob -1 for every token."""

    def __init__(self, base_folder: str) -> None:
        super().__init__()
        self.base_folder = base_folder

    async def start(self, epoch: int) -> Any:
        return type(await super().start(epoch))(MODEL, self.base_folder, 320, 512, 512, ("policy", "critic"))

    async def forward_backward(
        self, spec: ModelSpec, turn: Turn, columns: Columns, loss: LossCall | None, forward_only: bool
    ) -> LossOutput:
        await super().forward_backward(spec, turn, columns, loss, forward_only)
        ones = np.ones(columns.shape, np.float32)
        fields = {"values" if spec.role == "critic" else "logprobs": -ones}
        if loss is not None:
            fields["elementwise_loss"] = ones
        return LossOutput(columns.offsets, fields, {"loss:sum": float(columns.num_tokens)}, columns.widths)

    async def sample(
        self, request_id: str, prompt: tuple[int, ...], params: SamplingParams, weights: SamplerWeights
    ) -> SampleOutput:
        length = params.max_tokens
        one = Sequence(np.full(length, 7, np.int32), np.full(length, -1.0, np.float32), "length")
        logprobs = np.full(len(prompt), -1.0, np.float32)
        logprobs[0] = np.nan
        k, alternatives = params.topk_prompt_logprobs, params.prompt_alternatives
        targets = params.prompt_targets
        cells = (len(prompt) - 1, alternatives)
        return SampleOutput(
            (one,) * params.num_samples, weights.version, logprobs if params.prompt_logprobs else None,
            np.full((len(prompt), k), 7, np.int32) if k else None, np.full((len(prompt), k), -1.0, np.float32) if k else None,
            targets=targets and TargetLogprobs(np.full(len(targets.ids), -1.0, np.float32), targets.shape, targets.layout),
            alternatives=PromptAlternatives(np.full(cells, 7), np.full(cells, -1.0, np.float32)) if alternatives else None,
        )  # fmt: skip


class LocalHandle:
    """Called as a Ray actor's handle is."""

    def __init__(self, controller: Controller):
        self._controller = controller

    def __getattr__(self, name: str) -> Any:
        own = type(self).__dict__.get(f"_{name}")
        return _Method(own.__get__(self) if own else getattr(self._controller, name))

    async def _retrieve(self, request_id: str, timeout_s: float) -> Any:
        return await self._controller.retrieve(request_id, timeout_s) or self._controller.waiting()

    async def _heartbeat(self, session_id: str) -> None:
        self._controller.heartbeat(session_id)

    async def _get_sampler(self, sampler_id: str) -> Any:
        return self._controller.tenants.sampler(sampler_id)

    async def _get_model(self, model_id: str) -> Any:
        return self._controller.tenants.model(model_id)

    async def _get_capabilities(self) -> Any:
        return self._controller.able

    async def _fault(self) -> str | None:
        return self._controller.fault()


class _Method:
    def __init__(self, method: Any):
        self._method = method

    def remote(self, *arguments: Any) -> Any:
        return asyncio.ensure_future(self._method(*arguments))


async def serve(port: int, folder: Path, base_folder: str) -> None:
    config = ClusterConfig(
        base_model=TinyBase(name=MODEL),
        checkpoint_dir=folder / "checkpoints",
        journal=JournalConfig(folder=folder / "journal"),
        lora=LoraConfig(max_adapters=256),
    )
    controller = Controller(config, AnsweringBackend(base_folder), SqlJournal(config.journal))
    await controller.start()
    client: Any = ControllerClient(LocalHandle(controller))  # pyright: ignore[reportArgumentType]
    app = build_app(ApiState(config, client))
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", lifespan="off"))
    try:
        await server.serve()
    finally:
        await controller.close()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
