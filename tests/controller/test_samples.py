"""Retries of a sample: how often, after which faults, and what the client gets."""

from pathlib import Path
from typing import Any

import pytest

from skyrl_actors.config.base_models import TinyBase
from skyrl_actors.config.cluster import ClusterConfig, JournalConfig
from skyrl_actors.config.restart import RestartConfig
from skyrl_actors.controller.controller import Controller
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages.errors import (
    InternalError,
    InvalidRequest,
    PartDown,
    SkyrlActorsError,
    StateLost,
    Unavailable,
    WeightsGone,
)
from skyrl_actors.messages.results import Failure, SampleOutput
from tests.fakes import FakeBackend

ATTEMPTS = 3


class Faulty(FakeBackend):
    """A backend whose samples raise these errors first."""

    def __init__(self, faults: list[SkyrlActorsError]):
        super().__init__()
        self.faults = faults
        self.ended: list[str] = []
        self.tried = 0

    async def sample(self, *arguments: Any, **named: Any) -> SampleOutput:
        self.tried += 1
        if self.faults:
            raise self.faults.pop(0)
        return await super().sample(*arguments, **named)

    def end_stream(self, request_id: str) -> None:
        self.ended.append(request_id)


async def sampled(folder: Path, backend: Faulty) -> Any:
    config = ClusterConfig(
        base_model=TinyBase(name="tiny"),
        checkpoint_dir=folder / "checkpoints",
        journal=JournalConfig(folder=folder / "journal"),
        restart=RestartConfig(max_in_a_row=ATTEMPTS + 1),
    )
    controller = Controller(config, backend, SqlJournal(config.journal, KINDS))
    await controller.start()
    try:
        session = await controller.create_session()
        sampler = await controller.open_sampler(None, session, "tiny", None)
        request = rq.Sample(
            sampler_id=sampler.sampler_id,
            prompt=(1, 2, 3),
            params=rq.SamplingParams(max_tokens=1),
            seq_id=0,
        )
        request_id = await controller.submit(request)
        result = await controller.answers.whole(request_id, 30)
        assert backend.ended == [request_id]
        return result
    finally:
        await controller.close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_actors.controller.samples.LONGEST_PAUSE_S", 0.01)


async def test_a_sample_outlives_two_deaths_of_engines_and_any_number_of_waits(tmp_path: Path):
    waits = [PartDown("restarting")] * 5 + [Unavailable("no disk")] * 2
    backend = Faulty([StateLost("died"), *waits, StateLost("died")])
    assert isinstance(await sampled(tmp_path, backend), SampleOutput)
    assert backend.tried == 10


async def test_a_sample_under_which_every_engine_dies_fails_with_the_last_death(tmp_path: Path):
    backend = Faulty([StateLost("first"), StateLost("second"), StateLost("third")])
    result = await sampled(tmp_path, backend)
    assert isinstance(result, Failure) and backend.tried == ATTEMPTS
    assert result.message == "3 engines died under this sample, the last one: third"


async def test_weights_that_another_sample_rebuilt_are_tried_again(tmp_path: Path):
    backend = Faulty([WeightsGone("no file")] * ATTEMPTS)
    assert isinstance(await sampled(tmp_path, backend), SampleOutput)


@pytest.mark.parametrize("error", [InternalError("a bug"), InvalidRequest("top_p 2")])
async def test_other_errors_are_not_retried(tmp_path: Path, error: SkyrlActorsError):
    backend = Faulty([error])
    result = await sampled(tmp_path, backend)
    assert isinstance(result, Failure) and str(error) in result.message and backend.tried == 1
