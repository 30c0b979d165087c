"""A stream continues although its sample began within a poll that found nothing."""

import asyncio
from pathlib import Path

import numpy as np

from skyrl_actors.engines.partials import Partials
from skyrl_actors.engines.streamed import StreamedSamples
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages.results import PartialSample
from tests.controller.test_used_ids import started
from tests.fakes import FakeBackend


class Streaming(FakeBackend):
    """A backend whose sample begins when `begin` is called, and grows until `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.streamed, self.partials = StreamedSamples(), Partials()
        self.partial = self.streamed.partial  # type: ignore[method-assign]
        self.end_stream = self.streamed.end  # type: ignore[method-assign]

    async def ask(self, _: object, attempt: str, have: int, timeout_s: float) -> PartialSample:
        return await self.partials.after(attempt, have, timeout_s)

    def begin(self, request_id: str) -> None:
        self.streamed.record(f"{request_id}.0", self)  # type: ignore[arg-type]

    def grow(self, request_id: str, tokens: int) -> None:
        part = PartialSample(
            tokens=np.arange(tokens, dtype=np.int32), logprobs=np.zeros(tokens, np.float32)
        )
        self.partials.grow(f"{request_id}.0", part)


async def test_tokens_after_a_poll_in_which_a_sample_began_are_found(tmp_path: Path):
    backend = Streaming()
    controller = await started(tmp_path, backend)
    session = await controller.create_session()
    sampler = await controller.open_sampler(f"{session}:sample:0", session, "tiny", None)
    backend.go.clear()
    params = rq.SamplingParams(max_tokens=4, stream=True)
    request = rq.Sample(sampler_id=sampler.sampler_id, prompt=(1,), params=params)
    request_id = await controller.submit(request)
    poll = asyncio.create_task(controller.answers.partial(request_id, 0, 0.5))
    await asyncio.sleep(0.3)
    backend.begin(request_id)
    assert await poll == PartialSample()
    backend.grow(request_id, 3)
    part = await controller.answers.partial(request_id, 0, 5)
    assert isinstance(part, PartialSample) and len(part.tokens) == 3
    backend.go.set()
    await controller.close()
