"""Give trainers the experts that engines chose for the same tokens (`router_replay`).

A sample's answer goes to the journal with its routes. They are kept in memory for the model whose
weights it used, and added to that model's forward_backward requests before these are accepted. So a
request that is run again after a failure has the same routes.
"""

import asyncio
import logging
from dataclasses import replace

from skyrl_actors.config.base_configs import BaseConfigs
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.controller.sampled_routes import SampledRoutes
from skyrl_actors.controller.tasks import Tasks
from skyrl_actors.controller.tenants import Model, Sampler, TenantTable
from skyrl_actors.journal.entries import Operation
from skyrl_actors.journal.protocol import Journal
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages.errors import Corrupt
from skyrl_actors.messages.paths import owner_of, parse_path
from skyrl_actors.messages.results import Result, SampleOutput, without_routes

RECALLED = 1024  # the newest samples of a model that are read after a restart
log = logging.getLogger(__name__)


class RouterReplay:
    """The routes of sampled tokens, from engines to trainers."""

    def __init__(
        self,
        config: ClusterConfig,
        configs: BaseConfigs,
        tenants: TenantTable,
        journal: Journal,
        tasks: Tasks,
    ):
        self._configs = configs
        self._tenants = tenants
        self._journal = journal
        self._routes = SampledRoutes(config.limits.route_bytes)
        self._before = 1
        self._recalling: dict[str, asyncio.Task[None]] = {}
        self._read_before: set[str] = set()  # ids of samples, if a reading failed midway
        self._tasks = tasks

    def _replays(self, base_model: str) -> bool:
        return self._configs.of(base_model).router_replay

    def begin(self, next_number: int) -> None:
        """Set the first number of this controller; earlier samples are read when needed."""
        self._before = next_number

    def sampled(self, request: rq.Sample, result: Result, sampler: Sampler) -> Result:
        """Keep a sample's routes. Return the result to store, without routes if none can use it."""
        if not isinstance(result, SampleOutput):
            return result
        model_id = model_of(sampler)
        if not self._replays(sampler.base_model) or model_id not in self._tenants.models:
            return without_routes(result)
        self._routes.keep(self._tenants.models)
        dropped = self._routes.dropped
        for one in result.sequences:
            if one.routes is not None:
                self._routes.add(model_id, request.prompt, one.tokens, one.routes)
        if not dropped and self._routes.dropped:
            log.warning("routes of samples are dropped: they exceed limits.route_bytes")
        return result

    async def with_routes(self, request: rq.ModelRequest, model: Model) -> rq.ModelRequest:
        """Add the routes of a policy's batch. Raises Unavailable if samples cannot be read."""
        replays = self._replays(model.spec.base_model) and model.spec.role == "policy"
        if not replays or not isinstance(request, rq.ForwardBackward):
            return request
        await self._recall(request.model_id)
        routes = await asyncio.to_thread(self._routes.of, request.model_id, request.columns)
        return replace(request, columns=replace(request.columns, routes=routes))

    async def _recall(self, model_id: str) -> None:
        """Read a model's samples from before the restart, unless done."""
        if self._before == 1:
            return
        reading = self._recalling.get(model_id)
        if reading is None or (reading.done() and (reading.cancelled() or reading.exception())):
            reading = self._recalling[model_id] = self._tasks.spawn(self._read(model_id))
        await asyncio.shield(reading)

    async def _read(self, model_id: str) -> None:
        """Read the newest samples first, until there is no room."""
        left = RECALLED
        own = [s for s in self._tenants.samplers.values() if model_of(s) == model_id]
        for sampler in reversed(own):
            found = await self._journal.newest_answered(sampler.sampler_id, self._before, left)
            for op in reversed(found):
                if op.kind == "Sample" and not await self._read_sample(model_id, op):
                    return
            left -= len(found)
            if left <= 0:
                return

    async def _read_sample(self, model_id: str, op: Operation) -> bool:
        """Add a sample's routes. Return False if there is no room."""
        if op.failed or op.request_id in self._read_before:
            return True
        try:
            request, result = await self._journal.request(op), await self._journal.result(op)
        except Corrupt as error:
            log.warning("the experts of sample %s are lost: %s", op.request_id, error)
            return True
        self._read_before.add(op.request_id)
        if not isinstance(request, rq.Sample) or not isinstance(result, SampleOutput):
            return True
        return all(
            self._routes.add_older(model_id, request.prompt, one.tokens, one.routes)
            for one in result.sequences
            if one.routes is not None
        )


def model_of(sampler: Sampler) -> str:
    """Return the model that the sampler's client trained, or "" if there is none.

    It has none for the base model, and for a checkpoint of another API key.
    """
    if sampler.owner is not None:
        return sampler.owner
    model_id = parse_path(sampler.model_path).model_id if sampler.model_path else ""
    return model_id if owner_of(model_id) == owner_of(sampler.sampler_id) else ""
