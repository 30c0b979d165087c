"""Saves of one API key on two base models that share the devices never wait for each other."""

import asyncio
from pathlib import Path

from skyrl_actors.backends.catalogue import CatalogueBackend
from skyrl_actors.config.cluster import ClusterConfig, HttpConfig, JournalConfig
from skyrl_actors.config.keys import hashed, owner_of_name
from skyrl_actors.controller.controller import Controller
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.model import AdamParams, LoraSpec, ModelSpec
from skyrl_actors.messages.usage import Quota
from tests.backends.test_catalogue import FakeFactory

ANN = owner_of_name("ann", "")


async def test_a_save_that_holds_its_base_model_waits_for_no_other_save(tmp_path: Path):
    config = ClusterConfig(
        base_models={name: {"base_model": {"type": "tiny", "name": name}} for name in "ab"},  # type: ignore[dict-item]
        http=HttpConfig(api_keys=(hashed("ann=tml-of-ann-123"),)),
        checkpoint_dir=tmp_path / "checkpoints",
    )
    factory = FakeFactory("ab")
    backend = CatalogueBackend(factory, factory.log.append, attempts=2)
    journal = SqlJournal(JournalConfig(folder=tmp_path / "journal"), KINDS)
    controller = Controller(config, backend, journal)
    await controller.start()
    await controller.admin.usage.set_quota("ann", Quota(checkpoint_bytes=10**9), "eve")
    session = await controller.create_session(f"s1k{ANN}")

    async def answer(*requests: rq.Request) -> list[rs.Result | None]:
        ids = [await controller.submit(request) for request in requests]
        return await asyncio.gather(*(controller.answers.whole(one, 10) for one in ids))

    models: dict[str, str] = {}
    for number, base in enumerate("ab"):
        models[base] = f"{session}:train:{number}"
        spec = ModelSpec(model_id=models[base], base_model=base, lora=LoraSpec(rank=4))
        await answer(rq.CreateModel(spec=spec, session_id=session))
    taken = rq.SaveWeights(model_id=models["a"], name="taken")
    await answer(taken)
    for number in range(6):
        # after a failure, the next save holds its base model while it is checked
        (failed,) = await answer(taken)
        assert isinstance(failed, rs.Failure)
        saves = (rq.SaveWeights(model_id=models[base], name=f"n{number}") for base in "ba")
        for saved in await answer(*saves):
            assert isinstance(saved, rs.Saved), number
    await controller.close()


async def test_a_start_loads_no_base_model_for_models_without_requests(tmp_path: Path):
    """Otherwise a takeover would bring one base model after the other to the devices."""
    names = "abc"
    config = ClusterConfig(
        base_models={name: {"base_model": {"type": "tiny", "name": name}} for name in names},  # type: ignore[dict-item]
        checkpoint_dir=tmp_path / "checkpoints",
    )

    async def started(factory: FakeFactory) -> Controller:
        backend = CatalogueBackend(factory, factory.log.append, attempts=2)
        journal = SqlJournal(JournalConfig(folder=tmp_path / "journal"), KINDS)
        controller = Controller(config, backend, journal)
        await controller.start()
        return controller

    async def asked(controller: Controller, request: rq.Request) -> rs.Result | None:
        return await controller.answers.whole(await controller.submit(request), 10)

    first = FakeFactory(names, max_loaded=1)
    controller = await started(first)
    models: list[str] = []
    for name in names:
        session = await controller.create_session()
        models.append(f"{session}:train:0")
        spec = ModelSpec(model_id=models[-1], base_model=name, lora=LoraSpec(rank=4))
        await asked(controller, rq.CreateModel(spec=spec, session_id=session))
    for model_id in models:
        stepped = await asked(controller, rq.OptimStep(model_id, AdamParams(), 1))
        assert isinstance(stepped, rs.StepDone)
    await controller.abandon()

    second = FakeFactory(names, running="c", max_loaded=1)
    second.facts = first.facts
    controller = await started(second)
    await asyncio.sleep(0.5)
    assert not [text for text in second.log if text.startswith("start ")]
    stepped = await asked(controller, rq.OptimStep(models[0], AdamParams(), 2))
    assert isinstance(stepped, rs.StepDone)
    assert [text for text in second.log if text.startswith("start ")] == ["start a"]
    await controller.close()
