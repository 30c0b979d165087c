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
from skyrl_actors.messages.model import LoraSpec, ModelSpec
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
