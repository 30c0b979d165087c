"""The simulated parts of `bench.scale_cluster`: time, engines and the training group."""

import asyncio
import random
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bench.stub_engine import StubEngine, nothing
from skyrl_actors.backends.backend import ServedModels
from skyrl_actors.config.cluster import (
    ClusterConfig,
    EngineConfig,
)
from skyrl_actors.engines.logprob_check import LogprobCheck
from skyrl_actors.engines.pool import EnginePool
from skyrl_actors.groups.batcher import Batcher, Call
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages.results import LossOutput, SampleOutput, Sequence
from skyrl_actors.messages.weights import SamplerWeights, WeightManifest
from tests.fakes import FakeBackend, changed
from tests.simulation.clock import NoSelector

PLACES = 256  # sequences that one engine runs at once
ENGINE_TOKENS_S, SEQUENCE_TOKENS_S = 4000.0, 60.0
TRAIN_TOKENS_S, PASS_S, PASS_TOKENS = 3_200_000.0, 0.05, 1_048_576
STEP_S, EXPORT_S = 0.02, 0.05


class InPlace(ThreadPoolExecutor):
    """Runs work at once, in the caller."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  raised by the future
            done.set_exception(error)
        return done


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer."""

    def __init__(self) -> None:
        selector = NoSelector(end_s=float("inf"))
        super().__init__(selector)
        selector.loop = self
        self.now = 0.0
        self._clock_resolution = 1e-9
        self.set_default_executor(InPlace())

    def time(self) -> float:
        return self.now

    def _write_to_self(self) -> None:
        """Wake nobody: there are no other threads."""


class Engine(StubEngine):
    """One engine: its sequences share its tokens a second, and more of them wait."""

    def __init__(self, number: int, farm: "Farm"):
        super().__init__(f"engine:{number}")
        self._farm = farm
        self._running = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def ask(self, method: Any, *arguments: Any, **named: Any) -> Any:
        if method.__name__ != "sample":
            return None
        request_id, _, params, _, version, _ = arguments
        await self._enter(params.num_samples)
        self._farm.began(request_id.rpartition(".")[0], "sample")
        lengths = self._farm.lengths(params)
        rate = min(SEQUENCE_TOKENS_S, ENGINE_TOKENS_S / self._running) / self._farm.unit
        for length in lengths:
            asyncio.get_running_loop().call_later(length / rate, self._leave, 1)
        await asyncio.sleep(max(lengths) / rate)
        self._farm.busy_s += sum(lengths) * self._farm.unit / ENGINE_TOKENS_S
        sequences = tuple(
            Sequence(tokens=TOKENS[:n], logprobs=ONES[:n], stop_reason="stop") for n in lengths
        )
        return SampleOutput(sequences=sequences, version=version)

    async def _enter(self, count: int) -> None:
        if self._waiting or self._running + count > PLACES:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((count, turn))
            await turn
        else:
            self._running += count

    def _leave(self, count: int) -> None:
        self._running -= count
        while self._waiting and self._running + self._waiting[0][0] <= PLACES:
            count, turn = self._waiting.popleft()
            self._running += count
            turn.set_result(None)


TOKENS, ONES = np.full(8192, 7, np.int32), np.full(8192, -1.0, np.float32)


class Farm(FakeBackend):
    """The training group and the engines of the cluster.

    `unit`: the number of tokens that one entry of an array stands for.
    """

    def __init__(self, seed: int, slow: str, num_engines: int, unit: int):
        super().__init__()
        self.unit = unit
        self._chance = random.Random(seed)
        is_slow = slow == "training"
        self._train_tokens_s = (TRAIN_TOKENS_S / 20 if is_slow else TRAIN_TOKENS_S) / unit
        self.shortest = 0.02 if is_slow else 1.0  # of answers, as a part of what they would be
        self.busy_s = 0.0  # of all engines
        self.sent: dict[str, tuple[float, str]] = {}  # when and by which kind of tenant
        self.waits: dict[str, list[float]] = defaultdict(list)
        check = LogprobCheck(ClusterConfig().logprob_check, 1e-4, "float32", print)
        self.pool = EnginePool(EngineConfig(), Path("/"), nothing, check)
        self.pool.engines = [Engine(number, self) for number in range(num_engines)]
        self._batcher = Batcher(self._compute, PASS_TOKENS // unit)
        self._group = asyncio.Lock()

    def began(self, request_id: str, verb: str) -> None:
        if (sent := self.sent.pop(request_id, None)) is not None:
            at, kind = sent
            self.waits[f"{kind} {verb}"].append(asyncio.get_running_loop().time() - at)

    def lengths(self, params: rq.SamplingParams) -> list[int]:
        most = params.max_tokens
        return [
            max(1, min(most, int(self.shortest * self._chance.gammavariate(4, most / 8))))
            for _ in range(params.num_samples)
        ]

    async def stand_by(self) -> None: ...

    async def start(self, epoch: int) -> ServedModels:
        longest = {"max_context_tokens": 32_768, "max_sample_tokens": 32_768}
        return changed(await super().start(epoch), vocab_size=152_000, **longest)

    async def _used(self, seconds: float) -> None:
        async with self._group:
            await asyncio.sleep(seconds)

    async def forward_backward(
        self,
        spec: Any,
        precondition: Any,
        columns: Any,
        loss: Any,
        forward_only: bool,
        weight: float = 1.0,
    ) -> LossOutput:
        call = Call(
            model_id=spec.model_id,
            precondition=precondition,
            columns=columns,
            loss=loss,
            forward_only=forward_only,
            weight=weight,
        )
        output = await self._batcher.run(call)
        self.numbers[spec.model_id] = precondition.number or 0
        return output

    async def _compute(self, calls: Any) -> list[LossOutput]:
        for call in calls:
            self.began(call.precondition.request_id, "forward_backward")
        tokens = sum(call.columns.num_tokens for call in calls)
        await self._used(PASS_S + tokens / self._train_tokens_s)
        return [
            LossOutput(
                offsets=call.columns.offsets,
                fields={"logprobs": call.columns.fields["logprobs"]},
                metrics={"loss:sum": 0.0},
            )
            for call in calls
        ]

    async def optim_step(self, spec: Any, precondition: Any, adam: Any) -> dict[str, float]:
        self.began(precondition.request_id, "optim_step")
        await self._used(STEP_S)
        self.numbers[spec.model_id] = precondition.number or 0
        return {}

    async def save_for_sampler(
        self, spec: Any, precondition: Any, version: str, written: bool = False
    ) -> SamplerWeights:
        await self._used(EXPORT_S)
        part = WeightManifest(version=version, kind="lora", path=version, num_bytes=1)
        return SamplerWeights(version=version, parts=(part,), base_model=spec.base_model)

    async def drop_sampler(self, weights: SamplerWeights) -> None:
        await self.pool.drop(weights)

    async def sample(
        self, request_id: str, prompt: Any, params: Any, weights: Any, pictures: Any = ()
    ) -> SampleOutput:
        with self.pool.versions.using(weights):
            await self.pool.any_healthy(weights, params)
            return await self.pool.sample(f"{request_id}.0", prompt, params, weights)
