"""A model is filled while its base model stays on the devices, however long its replay takes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_actors.backends.catalogue import CatalogueBackend
from skyrl_actors.colocation.residency import Residency
from skyrl_actors.config.cluster import ClusterConfig, JournalConfig
from skyrl_actors.controller.controller import Controller
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.errors import Unavailable
from skyrl_actors.messages.model import AdamParams, LoraSpec, ModelSpec
from tests.backends.test_catalogue import FakeFactory, Parkable

STEPS, STEP_S, TURN_S = 12, 0.05, 0.3


class Slow(FakeFactory):
    """Two base models of which one is loaded. A replay of all steps takes two turns."""

    async def reserve(self) -> Residency:
        sizes = dict.fromkeys(self.names, 1)
        return Residency(sizes, 1, min_residence_s=TURN_S, idle_s=0.05, max_loaded=1)

    def build(self, name: str) -> Parkable:
        made = super().build(name)
        step = made.optim_step

        async def slow(*arguments: Any) -> Any:
            await asyncio.sleep(STEP_S)
            return await step(*arguments)

        made.optim_step = slow  # type: ignore[method-assign]
        return made


class Service:
    """A service with base models a and b, of which one is on the devices."""

    def __init__(self, folder: Path, factory: FakeFactory):
        bases = {name: {"base_model": {"type": "tiny", "name": name}} for name in "ab"}
        config = ClusterConfig.model_validate(
            {"base_models": bases, "checkpoint_dir": folder / "checkpoints"}
        )
        self.factory = factory
        backend = CatalogueBackend(self.factory, self.factory.log.append, attempts=5)
        journal = SqlJournal(JournalConfig(folder=folder / "journal"), KINDS)
        self.controller = Controller(config, backend, journal)

    async def asked(self, request: rq.Request) -> rs.Result:
        answer = await self.controller.answers.whole(await self.controller.submit(request), 30)
        assert answer is not None
        return answer

    async def train(self, model_id: str) -> None:
        for number in range(10**6):
            await self.asked(rq.OptimStep(model_id, AdamParams(), number + 1))


def spec(number: int, base: str) -> ModelSpec:
    return ModelSpec(model_id=f"s1:train:{number}", base_model=base, lora=LoraSpec(rank=4))


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    """A service with a trained model of base a, while another client trains one of base b."""
    made = Service(tmp_path, Slow("ab"))
    await made.controller.start()
    await made.controller.create_session("s1")
    for number, base in enumerate("ab"):
        await made.asked(rq.CreateModel(spec=spec(number, base), session_id="s1"))
    for number in range(STEPS):
        await made.asked(rq.OptimStep("s1:train:0", AdamParams(), number + 1))
    await made.asked(rq.SaveWeights(model_id="s1:train:0", name="x", seq_id=STEPS + 1))
    others = asyncio.create_task(made.train("s1:train:1"))
    await asyncio.sleep(0.2)
    made.factory.log.clear()
    yield made
    others.cancel()
    await asyncio.gather(others, return_exceptions=True)
    await made.controller.abandon()


async def test_a_model_is_created_from_a_step_that_is_longer_than_a_turn_away(service: Service):
    path = f"tinker://s1:train:0/steps/{STEPS}"
    request = rq.CreateModel(spec=spec(9, "a"), session_id="s1", from_path=path)
    async with asyncio.timeout(60):
        assert isinstance(await service.asked(request), rs.Loaded)
    assert service.factory.log.count("start a") <= 1


async def test_a_load_keeps_its_base_model_until_its_snapshot_is_taken(service: Service):
    path = "tinker://s1:train:0/weights/x"
    request = rq.LoadWeights(
        model_id="s1:train:0", path=path, with_optimizer=True, seq_id=STEPS + 2
    )
    async with asyncio.timeout(60):
        assert isinstance(await service.asked(request), rs.Loaded)
    assert service.factory.log.count("start a") <= 1


async def test_a_load_whose_snapshot_cannot_be_written_holds_up_no_other_base_model(
    service: Service, monkeypatch: pytest.MonkeyPatch
):
    journal, away = service.controller.journal, [True]
    seal = journal.seal_snapshot

    async def sealed(*arguments: Any) -> Any:
        if away:
            raise Unavailable("journal.mirror does not answer")
        return await seal(*arguments)

    monkeypatch.setattr(journal, "seal_snapshot", sealed)
    path = "tinker://s1:train:0/weights/x"
    request = rq.LoadWeights(
        model_id="s1:train:0", path=path, with_optimizer=True, seq_id=STEPS + 2
    )
    loading = asyncio.create_task(service.asked(request))
    await asyncio.sleep(1.0)
    for number, base in ((7, "b"), (8, "a")):
        create = rq.CreateModel(spec=spec(number, base), session_id="s1")
        assert isinstance(await service.asked(create), rs.ModelCreated)
    assert not loading.done()
    away.clear()
    assert isinstance(await loading, rs.Loaded)
