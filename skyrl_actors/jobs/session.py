"""The session of a job with the controller: its models, its requests, and its heartbeats."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy as np

from skyrl_actors.api.client import ControllerClient
from skyrl_actors.jobs.patience import submitted
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.catalog import SessionLabels
from skyrl_actors.messages.columns import Columns, offsets_of
from skyrl_actors.messages.errors import InternalError, SkyrlActorsError
from skyrl_actors.messages.model import AdamParams, LoraSpec, LossCall, ModelSpec, Role
from skyrl_actors.messages.paths import model_id_for, parse_path, sampler_id_for

log = logging.getLogger(__name__)
R = TypeVar("R", bound=rs.Result)
HEARTBEAT_S, LOST_S, FINISH_S = 30.0, 120.0, 20.0
# Of one request. The limits of a controller are higher.
PART_ROWS, PART_TOKENS, PART_IMAGE_BYTES = 512, 2**20, 2**25
CROSS_ENTROPY = LossCall("cross_entropy", {})


class ServiceSession:
    """Sends the requests of a job. Each method waits for the result."""

    def __init__(self, client: ControllerClient, session_id: str, base_model: str):
        self.client = client
        self.session_id = session_id
        self.base_model = base_model
        self._models = 0
        self._samplers = 0

    async def create(self, role: Role, lora: LoraSpec | None, seed: int = 0) -> str:
        """Create a model, and return its id."""
        return await self._create(
            ModelSpec(model_id="", base_model=self.base_model, role=role, lora=lora, seed=seed),
            None,
        )

    async def create_from(self, path: str, with_optimizer: bool = False) -> str:
        """Create a model from a checkpoint, and return its id."""
        return await self._create(
            await self.client.calls.checkpoint_spec(parse_path(path)), path, with_optimizer
        )

    async def _create(self, spec: ModelSpec, path: str | None, with_optimizer: bool = False) -> str:
        model_id = model_id_for(self.session_id, self._models)
        self._models += 1
        own = ModelSpec(
            model_id=model_id,
            base_model=spec.base_model,
            role=spec.role,
            lora=spec.lora,
            seed=spec.seed,
            optimizer=spec.optimizer,
        )
        request = rq.CreateModel(
            spec=own, session_id=self.session_id, from_path=path, with_optimizer=with_optimizer
        )
        await self.run(request, rs.Loaded if path else rs.ModelCreated)
        return model_id

    async def submit(self, request: rq.Request) -> str:
        """Send a request as soon as it is accepted, and return its id without its result."""
        return await submitted(self.client, request)

    async def run(self, request: rq.Request, expected: type[R]) -> R:
        """Send a request, and return its result."""
        return await self.client.result(await self.submit(request), expected)

    async def forward(
        self, model_id: str, rows: Columns, loss: LossCall = CROSS_ENTROPY
    ) -> rs.LossOutput:
        """Compute a loss and its per-token outputs, without gradients."""
        ids = [
            await self.submit(
                rq.ForwardBackward(model_id=model_id, columns=part, loss=loss, forward_only=True)
            )
            for part in split(rows)
        ]
        return joined([await self.client.result(request_id, rs.LossOutput) for request_id in ids])

    async def train(
        self, model_id: str, rows: Columns, loss: LossCall, adam: AdamParams
    ) -> tuple[rs.LossOutput, rs.StepDone]:
        """Train on one batch, and run the optimizer step.

        The step is sent after the batch was accepted, so their order is certain.
        """
        ids = [
            await self.submit(rq.ForwardBackward(model_id=model_id, columns=part, loss=loss))
            for part in split(rows)
        ]
        step_id = await self.submit(rq.OptimStep(model_id, adam))
        outputs = [await self.client.result(request_id, rs.LossOutput) for request_id in ids]
        return joined(outputs), await self.client.result(step_id, rs.StepDone)

    async def sampler(self, model_id: str) -> str:
        """Publish the current weights, and return the id of a sampler pinned to them."""
        sampler_id = sampler_id_for(self.session_id, self._samplers)
        self._samplers += 1
        await self.run(rq.SaveForSampler(model_id=model_id, sampler_id=sampler_id), rs.SamplerSaved)
        return sampler_id

    async def save(self, model_id: str, name: str) -> rs.Saved:
        """Save a checkpoint with this name. An older one of that name is overwritten."""
        return await self.run(
            rq.SaveWeights(model_id=model_id, name=name, overwrite=True), rs.Saved
        )

    async def load(
        self, model_id: str, path: str, mixed_with: str | None = None, share: float = 1.0
    ) -> None:
        """Load the weights of a checkpoint into a model.

        With `mixed_with`, a second checkpoint, the weights are a mean in which `path` has the
        weight `share`.
        """
        await self.run(
            rq.LoadWeights(
                model_id=model_id,
                path=path,
                with_optimizer=False,
                mixed_with=mixed_with,
                share=share,
            ),
            rs.Loaded,
        )


def split(rows: Columns) -> list[Columns]:
    """Split rows into the parts of separate requests. Losses are sums, so the parts add up."""
    parts: list[list[int]] = [[]]
    tokens = image_bytes = 0
    for row, length in enumerate(rows.lengths.tolist()):
        own_bytes = sum(len(image.content) for image in rows.images_of(row))
        if parts[-1] and (
            len(parts[-1]) >= PART_ROWS
            or tokens + length > PART_TOKENS
            or image_bytes + own_bytes > PART_IMAGE_BYTES
        ):
            parts.append([])
            tokens = image_bytes = 0
        parts[-1].append(row)
        tokens += length
        image_bytes += own_bytes
    return [rows] if len(parts) == 1 else [rows.only(part) for part in parts]


def joined(outputs: list[rs.LossOutput]) -> rs.LossOutput:
    """Concatenate the outputs of the parts, and add up their metrics."""
    if len(outputs) == 1:
        return outputs[0]
    lengths = np.concatenate([np.diff(output.offsets) for output in outputs])
    fields = {
        name: np.concatenate([output.fields[name] for output in outputs])
        for name in outputs[0].fields
    }
    sums: dict[str, float] = {}
    for output in outputs:
        for name, value in output.metrics.items():
            sums[name] = sums.get(name, 0.0) + value  # jobs only read metrics that are sums
    return rs.LossOutput(offsets=offsets_of(lengths.tolist()), fields=fields, metrics=sums)


@asynccontextmanager
async def opened(client: ControllerClient, job: str) -> AsyncGenerator[ServiceSession]:
    """Open a session, send heartbeats, and finish the session at the end.

    Raises:
        InternalError: The controller has not answered for LOST_S seconds. The controller of a job
            is not restarted.
    """
    capabilities = await client.calls.get_capabilities()
    session_id = await client.create_session(SessionLabels(user_metadata={"job": job}))
    lost: list[str] = []
    owner = asyncio.current_task()
    assert owner is not None
    beating = asyncio.create_task(_beat(client, session_id, lost, owner))
    try:
        yield ServiceSession(client, session_id, capabilities.default.base_model)
    except asyncio.CancelledError:
        if not lost:
            raise
        owner.uncancel()
        raise InternalError(
            f"the controller of this job has not answered for {LOST_S:.0f} s: {lost[0]}"
        ) from None
    finally:
        beating.cancel()
        if not lost:
            try:
                async with asyncio.timeout(FINISH_S):
                    await client.calls.finish_session(session_id)
            except (SkyrlActorsError, TimeoutError) as error:
                log.warning("the session could not be finished: %s", error)


async def _beat(
    client: ControllerClient, session_id: str, lost: list[str], owner: "asyncio.Task[Any]"
) -> None:
    last_answer = time.monotonic()
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        try:
            await client.calls.heartbeat(session_id)
            last_answer = time.monotonic()
        except SkyrlActorsError as error:
            log.warning("a heartbeat was not answered: %s", error)
            if time.monotonic() - last_answer > LOST_S:
                lost.append(str(error))
                owner.cancel()
                return
