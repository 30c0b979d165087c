"""A job goes on when the controller accepts nothing for a moment."""

from typing import Any

import pytest

from skyrl_actors.api.client import ControllerClient
from skyrl_actors.jobs import patience
from skyrl_actors.jobs.answers import AnswerSampler
from skyrl_actors.jobs.prompts import Prompt
from skyrl_actors.jobs.rollout import Weights
from skyrl_actors.jobs.session import ServiceSession
from skyrl_actors.messages.errors import CapacityError, InvalidRequest, Unavailable
from skyrl_actors.messages.requests import SamplingParams, Unload
from skyrl_actors.messages.results import SampleOutput


class Refusing(ControllerClient):
    """A controller's client that refuses the first two requests."""

    def __init__(self, error: Exception):
        super().__init__()
        self.error, self.ids = error, list[str | None]()

    async def submit(self, request: Any, mark: str = "", request_id: str | None = None) -> str:
        self.ids.append(request_id)
        if len(self.ids) < 3:
            raise self.error
        return str(request_id)

    async def result(self, request_id: str, expected: type[Any]) -> Any:
        return SampleOutput(sequences=(), version="v")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(patience, "RETRY_S", 0.01)


async def sampled(client: ControllerClient) -> None:
    params = SamplingParams(max_tokens=4, num_samples=1)
    with pytest.raises(ValueError, match="shorter"):  # of no sequences
        await AnswerSampler(client).first(lambda: Weights("s", 0), [Prompt((1, 2))], params)


@pytest.mark.parametrize("error", [Unavailable("the disk is full"), CapacityError("full")])
async def test_samples_are_sent_again_with_the_same_id(error: Exception):
    client = Refusing(error)
    await sampled(client)
    assert len(client.ids) == 3 and len(set(client.ids)) == 1 and client.ids[0]


async def test_training_requests_are_sent_again():
    client = Refusing(Unavailable("the disk is full"))
    await ServiceSession(client, "s", "b").run(Unload(model_id="m"), Any)
    assert len(client.ids) == 3


async def test_a_wrong_request_is_not_sent_again():
    client = Refusing(InvalidRequest("the prompt is too long"))
    with pytest.raises(InvalidRequest):
        await AnswerSampler(client).first(
            lambda: Weights("s", 0), [Prompt((1,))], SamplingParams(max_tokens=4, num_samples=1)
        )
    assert len(client.ids) == 1
