"""Ids of models and samplers are used once, because versions and files are named after them."""

import asyncio
from pathlib import Path

import pytest

from skyrl_actors.config.base_models import TinyBase
from skyrl_actors.config.cluster import ClusterConfig, JournalConfig
from skyrl_actors.controller.controller import Controller
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal.entries import Entry, SamplerOpened, SamplerRetired
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.errors import Conflict, Unavailable
from skyrl_actors.messages.model import LoraSpec, ModelSpec
from tests.controller.test_controller import done, model_in
from tests.fakes import FakeBackend


async def started(folder: Path, backend: FakeBackend | None = None) -> Controller:
    config = ClusterConfig(base_model=TinyBase(name="tiny"), checkpoint_dir=folder / "checkpoints")
    journal = SqlJournal(JournalConfig(folder=folder / "journal", retention_s=0.001), KINDS)
    controller = Controller(config, backend or FakeBackend(), journal)
    await controller.start()
    return controller


async def saved(controller: Controller, model_id: str, sampler_id: str, seq_id: int) -> rs.Result:
    request = rq.SaveForSampler(model_id=model_id, sampler_id=sampler_id, seq_id=seq_id)
    return await done(controller, await controller.submit(request))


async def test_an_unloaded_model_is_not_created_again(tmp_path: Path):
    controller = await started(tmp_path)
    session, model_id = await model_in(controller)
    spec = ModelSpec(model_id=model_id, base_model="tiny", lora=LoraSpec(rank=4))
    again = rq.CreateModel(spec=spec, session_id=session)
    await controller.submit(again)  # a retry of the first
    await done(controller, await controller.submit(rq.Unload(model_id)))
    with pytest.raises(Conflict, match="was unloaded, and its id is not used again"):
        await controller.submit(again)
    await controller.journal.sweep()
    await controller.abandon()
    controller = await started(tmp_path)
    with pytest.raises(Conflict, match="was unloaded"):
        await controller.submit(again)
    await controller.close()


async def test_a_sampler_is_not_replaced_by_a_later_save(tmp_path: Path):
    controller = await started(tmp_path)
    session, model_id = await model_in(controller)
    sampler_id = f"{session}:sample:0"
    first = await saved(controller, model_id, sampler_id, 1)
    assert isinstance(first, rs.SamplerSaved)
    refused = await saved(controller, model_id, sampler_id, 2)
    assert isinstance(refused, rs.Failure) and "exists" in refused.message
    assert controller.tenants.sampler(sampler_id).weights.version == first.version
    assert isinstance(await saved(controller, model_id, f"{session}:sample:1", 3), rs.SamplerSaved)
    await controller.close()


async def test_a_shared_sampler_that_opens_again_is_not_retired_by_an_old_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    controller = await started(tmp_path)
    journal, samplers = controller.journal, controller._named_samplers
    first = await samplers.open(None, None, "tiny", None)
    write, failed = journal.write, asyncio.Event()

    async def fails_once(*entries: Entry) -> None:
        if isinstance(entries[0], SamplerRetired) and not failed.is_set():
            failed.set()
            raise Unavailable("no space")
        await write(*entries)

    monkeypatch.setattr(journal, "write", fails_once)
    retired = asyncio.create_task(controller._samples.retire([first]))
    await failed.wait()
    again = await samplers.open(None, None, "tiny", None)
    assert again.sampler_id == first.sampler_id and again is not first
    await retired
    assert controller.tenants.sampler(again.sampler_id) is again
    await controller.abandon()
    controller = await started(tmp_path)
    assert controller.tenants.sampler(again.sampler_id)
    await controller.close()


async def test_a_sampler_is_not_retired_while_its_opening_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    controller = await started(tmp_path)
    journal, samplers = controller.journal, controller._named_samplers
    first = await samplers.open(None, None, "tiny", None)
    write, written, may_end = journal.write, asyncio.Event(), asyncio.Event()

    async def slow(*entries: Entry) -> None:
        await write(*entries)
        if isinstance(entries[0], SamplerOpened):
            written.set()
            await may_end.wait()

    controller.tenants.retire(first)
    monkeypatch.setattr(journal, "write", slow)
    opening = asyncio.create_task(samplers.open(None, None, "tiny", None))
    await written.wait()
    await controller._samples.retire([first])
    may_end.set()
    again = await opening
    await controller.abandon()
    controller = await started(tmp_path)
    assert controller.tenants.sampler(again.sampler_id)
    await controller.close()
