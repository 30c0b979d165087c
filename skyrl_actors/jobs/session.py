"""A job's session with the controller: its models, kept alive by heartbeats, and the verbs it uses."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from skyrl_actors.api.client import ControllerClient
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.model import AdamParams, LoraSpec, LossCall, ModelSpec, Role
from skyrl_actors.messages.paths import model_id_for, parse_path, sampler_id_for

HEARTBEAT_S = 30.0
CROSS_ENTROPY = LossCall("cross_entropy", {})


class Session:
    def __init__(self, client: ControllerClient, session_id: str, base_model: str):
        self.client = client
        self.session_id = session_id
        self.base_model = base_model
        self._models = 0
        self._samplers = 0

    async def create(self, role: Role, lora: LoraSpec | None, seed: int = 0) -> str:
        return await self._create(ModelSpec("", self.base_model, role, lora, seed), None)

    async def create_from(self, path: str, with_optimizer: bool = False) -> str:
        """A model as a checkpoint holds it."""
        return await self._create(await self.client.checkpoint_spec(parse_path(path)), path, with_optimizer)

    async def _create(self, spec: ModelSpec, path: str | None, with_optimizer: bool = False) -> str:
        model_id = model_id_for(self.session_id, self._models)
        self._models += 1
        own = ModelSpec(model_id, spec.base_model, spec.role, spec.lora, spec.seed, spec.optimizer)
        await self.client.run(
            rq.CreateModel(own, self.session_id, from_path=path, with_optimizer=with_optimizer), rs.ModelCreated
        )
        return model_id

    async def forward(self, model_id: str, rows: Columns, loss: LossCall = CROSS_ENTROPY) -> rs.LossOutput:
        return await self.client.run(rq.ForwardBackward(model_id, rows, loss, forward_only=True), rs.LossOutput)

    async def train(self, model_id: str, rows: Columns, loss: LossCall, adam: AdamParams) -> tuple[rs.LossOutput, rs.StepDone]:
        """One batch and its step. The step is sent once the batch was accepted: its place in the order is then certain."""
        batch_id = await self.client.submit(rq.ForwardBackward(model_id, rows, loss))
        step_id = await self.client.submit(rq.OptimStep(model_id, adam))
        return await self.client.result(batch_id, rs.LossOutput), await self.client.result(step_id, rs.StepDone)

    async def sampler(self, model_id: str) -> str:
        """A sampler that is pinned to the model's weights of now."""
        sampler_id = sampler_id_for(self.session_id, self._samplers)
        self._samplers += 1
        await self.client.run(rq.SaveForSampler(model_id, sampler_id=sampler_id), rs.SamplerSaved)
        return sampler_id

    async def save(self, model_id: str, name: str) -> rs.Saved:
        return await self.client.run(rq.SaveWeights(model_id, name, overwrite=True), rs.Saved)

    async def load(self, model_id: str, path: str) -> None:
        await self.client.run(rq.LoadWeights(model_id, path, with_optimizer=False), rs.Loaded)


@asynccontextmanager
async def opened(client: ControllerClient, job: str) -> AsyncIterator[Session]:
    capabilities = await client.capabilities()
    session_id = await client.create_session({"job": job})
    beating = asyncio.create_task(_beat(client, session_id))
    try:
        yield Session(client, session_id, capabilities.base_model)
    finally:
        beating.cancel()
        await client.finish_session(session_id)


async def _beat(client: ControllerClient, session_id: str) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        await client.heartbeat(session_id)
