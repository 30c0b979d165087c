"""Routes on their way from samples to training: journaled, by model, and over a restart."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_actors.config.base_models import TinyBase
from skyrl_actors.config.cluster import ClusterConfig, JournalConfig
from skyrl_actors.controller.controller import Controller
from skyrl_actors.controller.router_replay import model_of
from skyrl_actors.controller.tenants import Sampler
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.example import TARGETS
from skyrl_actors.messages.model import LoraSpec, LossCall, ModelSpec
from skyrl_actors.messages.paths import owner_mark
from skyrl_actors.messages.precondition import OpPrecondition
from skyrl_actors.messages.results import LossOutput, SampleOutput, Sequence
from skyrl_actors.messages.weights import SamplerWeights
from tests.fakes import FakeBackend

ANSWER = np.asarray([7, 8, 9], np.int32)
PROMPT = (4, 5, 6)
ROUTES = np.arange(1, 11, dtype=np.uint8).reshape(5, 2)
A, B = "a" * 10, "b" * 10  # API keys
CROSS_ENTROPY = LossCall("cross_entropy", {})


class RoutedBackend(FakeBackend):
    """A backend whose samples bring routes, and that keeps the batches it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Columns] = []

    async def sample(self, *arguments: Any, **named: Any) -> SampleOutput:
        output = await super().sample(*arguments, **named)
        one = Sequence(
            tokens=ANSWER,
            logprobs=np.zeros(3, np.float32),
            stop_reason="stop",
            routes=ROUTES,
        )
        return replace(output, sequences=(one,))

    async def forward_backward(
        self,
        spec: ModelSpec,
        precondition: OpPrecondition,
        columns: Columns,
        loss: LossCall | None,
        forward_only: bool,
        weight: float = 1.0,
    ) -> LossOutput:
        self.batches.append(columns)
        return await super().forward_backward(spec, precondition, columns, loss, forward_only)


@asynccontextmanager
async def controller_in(
    folder: Path, backend: RoutedBackend, router_replay: bool = True
) -> AsyncGenerator[Controller]:
    config = ClusterConfig(
        base_model=TinyBase(name="tiny"),
        checkpoint_dir=folder / "checkpoints",
        journal=JournalConfig(folder=folder / "journal"),
        router_replay=router_replay,
    )
    controller = Controller(config, backend, SqlJournal(config.journal, KINDS))
    await controller.start()
    try:
        yield controller
    finally:
        await controller.abandon()


async def done(controller: Controller, request: rq.Request) -> Any:
    return await controller.answers.whole(await controller.submit(request), 20)


async def new_model(controller: Controller, session: str, number: int = 0, **fields: Any) -> str:
    model_id = f"{session}:train:{number}"
    spec = ModelSpec(model_id=model_id, base_model="tiny", lora=LoraSpec(rank=4), **fields)
    await done(controller, rq.CreateModel(spec=spec, session_id=session))
    return model_id


async def sampled(controller: Controller, model_id: str, seq_id: int = 1) -> SampleOutput:
    sampler_id = f"{model_id.partition(':')[0]}:sample:0"
    save = rq.SaveForSampler(model_id=model_id, sampler_id=sampler_id, seq_id=seq_id)
    assert (await done(controller, save)).sampler_id == sampler_id
    params = rq.SamplingParams(max_tokens=3)
    return await done(
        controller, rq.Sample(sampler_id=sampler_id, prompt=PROMPT, params=params, seq_id=0)
    )


def training(model_id: str, seq_id: int) -> rq.ForwardBackward:
    """Return a batch of a row that was sampled and of one that was not."""
    tokens = np.asarray([*PROMPT, *ANSWER[:-1], 1, 2], np.int32)
    fields: dict[str, Any] = {TARGETS: tokens, "weights": np.ones(7, np.float32)}
    columns = Columns(tokens=tokens, offsets=np.asarray([0, 5, 7]), fields=fields)
    return rq.ForwardBackward(
        model_id=model_id, columns=columns, loss=CROSS_ENTROPY, forward_only=False, seq_id=seq_id
    )


def values(critic: str) -> rq.ForwardBackward:
    loss = LossCall("ppo_critic", {})
    return replace(training(critic, 1), loss=loss, forward_only=True)


def check(columns: Columns) -> None:
    assert columns.routes is not None
    wanted = np.concatenate([ROUTES, np.zeros((2, 2), np.uint8)])
    np.testing.assert_array_equal(columns.routes, wanted, strict=True)


async def test_a_batch_gets_the_routes_of_its_sampled_rows(tmp_path: Path):
    backend = RoutedBackend()
    async with controller_in(tmp_path, backend) as controller:
        model_id = await new_model(controller, await controller.create_session())
        output = await sampled(controller, model_id)
        assert output.sequences[0].routes is None  # clients do not get them
        result = await done(controller, training(model_id, 2))
        assert result.metrics["replayed_tokens:sum"] == 5
        check(backend.batches[0])
        operation = (await controller.journal.operations(model_id, 0, 100))[-1]
        stored = await controller.journal.request(operation)
        assert isinstance(stored, rq.ForwardBackward)
        check(stored.columns)


async def test_the_same_request_again_is_known(tmp_path: Path):
    backend = RoutedBackend()
    async with controller_in(tmp_path, backend) as controller:
        model_id = await new_model(controller, await controller.create_session())
        first = await controller.submit(training(model_id, 1))
        await sampled(controller, model_id, 2)
        assert await controller.submit(training(model_id, 1)) == first


async def test_models_without_the_samples_choose_their_experts(tmp_path: Path):
    backend = RoutedBackend()
    async with controller_in(tmp_path, backend) as controller:
        session = await controller.create_session()
        await sampled(controller, await new_model(controller, session))
        other = await new_model(controller, session, 1)
        critic = await new_model(controller, session, 2, role="critic")
        result = await done(controller, training(other, 1))
        assert result.metrics["replayed_tokens:sum"] == 0
        result = await done(controller, values(critic))
        assert "replayed_tokens:sum" not in result.metrics
        assert [columns.routes for columns in backend.batches] == [None, None]


async def test_routes_outlive_a_restart(tmp_path: Path):
    backend = RoutedBackend()
    async with controller_in(tmp_path, backend) as controller:
        model_id = await new_model(controller, await controller.create_session())
        await sampled(controller, model_id)
    async with controller_in(tmp_path, backend) as controller:
        await done(controller, training(model_id, 2))
        check(backend.batches[0])


@pytest.mark.parametrize(("most", "replayed"), [(1, 0), (2, 5)])
async def test_the_newest_samples_are_read_first_after_a_restart(
    most: int, replayed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("skyrl_actors.controller.router_replay.RECALLED", most)
    backend = RoutedBackend()
    async with controller_in(tmp_path, backend) as controller:
        model_id = await new_model(controller, await controller.create_session())
        await sampled(controller, model_id)
        sampler_id = f"{model_id.partition(':')[0]}:sample:0"
        params = rq.SamplingParams(max_tokens=3)
        newer = rq.Sample(sampler_id=sampler_id, prompt=(1, 1, 1), params=params, seq_id=1)
        await done(controller, newer)
    async with controller_in(tmp_path, backend) as controller:
        result = await done(controller, training(model_id, 2))
        assert result.metrics["replayed_tokens:sum"] == replayed


async def test_without_the_option_nothing_is_stored(tmp_path: Path):
    backend = RoutedBackend()
    async with controller_in(tmp_path, backend, router_replay=False) as controller:
        model_id = await new_model(controller, await controller.create_session())
        output = await sampled(controller, model_id)
        assert output.sequences[0].routes is None
        result = await done(controller, training(model_id, 2))
        assert backend.batches[0].routes is None
        assert "replayed_tokens:sum" not in result.metrics


def test_routes_belong_to_the_key_that_sampled():
    def sampler(sampler_id: str, **fields: Any) -> Sampler:
        weights = SamplerWeights(version="v")
        given = {"model_path": None, "session_id": None} | fields
        return Sampler(sampler_id=sampler_id, base_model="tiny", weights=weights, **given)

    first, second, other = f"1{owner_mark(A)}", f"2{owner_mark(A)}", f"3{owner_mark(B)}"
    model_id = f"{first}:train:0"
    path = f"tinker://{model_id}/sampler_weights/n"
    assert model_of(sampler(f"{first}:sample:0", owner=model_id)) == model_id
    assert model_of(sampler(f"{second}:sample:0", model_path=path)) == model_id
    assert model_of(sampler(f"{other}:sample:0", model_path=path)) == ""
    assert model_of(sampler(f"{first}:sample:0")) == ""
