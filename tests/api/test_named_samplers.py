"""Samplers of a named checkpoint: they sample from its present files or fail, and are freed."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from skyrl_actors.config.cluster import LimitsConfig
from skyrl_actors.controller import named_samplers
from skyrl_actors.messages.images import Picture
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import SampleOutput
from skyrl_actors.messages.weights import SamplerWeights, WeightManifest
from tests.api.local import MODEL, AnsweringBackend, config_for, edge, posted, resolved, silenced

ASKED = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": {"max_tokens": 1}}


class Serving(AnsweringBackend):
    """Records which versions were sampled and which were dropped."""

    def __init__(self, base_folder: str) -> None:
        super().__init__(base_folder)
        self.answered: list[str] = []

    @property
    def dropped(self) -> list[str]:
        return [version for verb, version in self.calls if verb == "drop_sampler"]

    async def open_sampler(self, base_model: str, folder: str, version: str) -> SamplerWeights:
        return SamplerWeights(
            version=version,
            parts=(WeightManifest(version=version, kind="lora", path=folder, num_bytes=1),),
        )

    async def sample(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        weights: SamplerWeights,
        pictures: tuple[Picture, ...] = (),
    ) -> SampleOutput:
        output = await super().sample(request_id, prompt, params, weights, pictures)
        self.answered.append(weights.version)
        return output


class Saved:
    """A model of one session, and its sampler checkpoint `one`."""

    def __init__(self, http: httpx.AsyncClient):
        self.http = http
        self.seq_id = 0

    async def make(self) -> "Saved":
        self.session = (await posted(self.http, "/create_session"))["session_id"]
        await resolved(
            self.http, "/create_model", session_id=self.session, model_seq_id=0, base_model=MODEL
        )
        self.model_id = f"{self.session}:train:0"
        self.path = f"tinker://{self.model_id}/sampler_weights/one"
        await self.save()
        return self

    async def save(self) -> None:
        self.seq_id += 1
        await resolved(
            self.http,
            "/save_weights_for_sampler",
            model_id=self.model_id,
            path="one",
            seq_id=self.seq_id,
        )

    async def delete(self) -> None:
        where = f"/training_runs/{self.model_id}/checkpoints/sampler_weights/one"
        assert (await self.http.delete(where)).status_code == 200

    async def open(self, number: int) -> dict[str, str]:
        """Open a sampling session of the checkpoint."""
        fields = {
            "session_id": self.session,
            "sampling_session_seq_id": number,
            "model_path": self.path,
        }
        await posted(self.http, "/create_sampling_session", **fields)
        return {"sampling_session_id": f"{self.session}:sample:{number}"}


async def until(reached: Any) -> None:
    async with asyncio.timeout(10):
        while not reached():  # noqa: ASYNC110  a loop of the service does it
            await asyncio.sleep(0.02)


@pytest.fixture
async def backend(tmp_path: Path) -> Serving:
    return Serving(str(tmp_path))


@pytest.fixture
async def http(tmp_path: Path, backend: Serving):
    async with edge(
        config_for(tmp_path, limits=LimitsConfig(session_timeout_s=60)), backend
    ) as made:
        yield made


async def test_a_path_is_sampled_from_its_present_files(http: httpx.AsyncClient, backend: Serving):
    saved = await Saved(http).make()
    for _ in range(2):
        assert "sequences" in await resolved(http, "/asample", model_path=saved.path, **ASKED)
    await saved.delete()
    gone = await http.post("/asample", json={"model_path": saved.path, **ASKED})
    assert gone.status_code == 404 and f"no checkpoint {saved.path}" in gone.text
    await saved.save()
    assert "sequences" in await resolved(http, "/asample", model_path=saved.path, **ASKED)
    first, again, second = backend.answered
    assert first == again != second


async def test_a_sampler_of_a_replaced_checkpoint_fails(http: httpx.AsyncClient):
    saved = await Saved(http).make()
    sampler = await saved.open(0)
    assert "sequences" in await resolved(http, "/asample", **sampler, **ASKED)
    await saved.delete()
    failed = await resolved(http, "/asample", **sampler, **ASKED)
    assert (
        failed["category"] == "user"
        and "was deleted" in failed["error"]
        and saved.path in failed["error"]
    )
    await saved.save()
    failed = await resolved(http, "/asample", **sampler, **ASKED)
    assert failed["category"] == "user" and "was saved again" in failed["error"]
    assert "sequences" in await resolved(http, "/asample", **await saved.open(1), **ASKED)


async def test_a_sample_fails_when_its_checkpoint_is_saved_again_meanwhile(
    http: httpx.AsyncClient, backend: Serving
):
    """It is unknown which of the two the engine loaded."""
    saved = await Saved(http).make()
    sampler = await saved.open(0)
    backend.sampling.clear()
    asked = await posted(http, "/asample", **sampler, **ASKED)
    await asyncio.sleep(0.05)  # the engine has the sample now
    await saved.delete()
    await saved.save()
    backend.sampling.set()
    failed = await posted(http, "/retrieve_future", request_id=asked["request_id"])
    assert "was saved again" in failed["error"]


async def test_a_version_is_dropped_from_engines_with_its_last_sampler(
    http: httpx.AsyncClient, backend: Serving
):
    saved, other = await Saved(http).make(), (await posted(http, "/create_session"))["session_id"]
    await resolved(http, "/asample", **await saved.open(0), **ASKED)
    fields = {"session_id": other, "sampling_session_seq_id": 0, "model_path": saved.path}
    await posted(http, "/create_sampling_session", **fields)
    end = {"reason": {"type": "success"}}
    assert (await http.post(f"/sessions/{saved.session}/finish", json=end)).status_code == 200
    assert backend.answered[0] not in backend.dropped
    assert (await http.post(f"/sessions/{other}/finish", json=end)).status_code == 200
    assert backend.dropped == backend.answered


async def test_samplers_without_a_session_are_freed_when_idle(
    tmp_path: Path, backend: Serving, monkeypatch: pytest.MonkeyPatch
):
    silenced(monkeypatch)
    monkeypatch.setattr("skyrl_actors.controller.model_capacity.SESSION_SILENT_S", 0.1)
    limits = LimitsConfig(session_timeout_s=0.3)
    async with edge(config_for(tmp_path, limits=limits), backend) as http:
        saved = await Saved(http).make()
        backend.sampling.clear()
        asked = await posted(http, "/asample", model_path=saved.path, **ASKED)
        await asyncio.sleep(0.6)
        assert not backend.dropped  # a sample is running
        backend.sampling.set()
        await posted(http, "/retrieve_future", request_id=asked["request_id"])
        await until(lambda: backend.dropped == backend.answered)
        assert "sequences" in await resolved(http, "/asample", model_path=saved.path, **ASKED)


async def test_samplers_of_a_deleted_checkpoint_are_freed_before_their_session_ends(
    tmp_path: Path, backend: Serving, monkeypatch: pytest.MonkeyPatch
):
    silenced(monkeypatch)
    limits = LimitsConfig(session_timeout_s=2)
    async with edge(config_for(tmp_path, limits=limits), backend) as http:
        saved = await Saved(http).make()
        sampler = await saved.open(0)
        await resolved(http, "/asample", **sampler, **ASKED)
        await saved.delete()
        await posted(http, "/session_heartbeat", session_id=saved.session)
        await until(lambda: backend.dropped == backend.answered)
        refused = await http.post("/asample", json={**sampler, **ASKED})
        assert refused.status_code == 404 and "was deleted" in refused.text


async def test_samplers_are_freed_after_a_file_could_not_be_read_once(
    tmp_path: Path, backend: Serving, monkeypatch: pytest.MonkeyPatch
):
    silenced(monkeypatch)
    failures = [OSError(5, "Input/output error")] * 3
    look = named_samplers.change_of

    def change_of(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return look(*arguments)

    async with edge(
        config_for(tmp_path, limits=LimitsConfig(session_timeout_s=1)), backend
    ) as http:
        saved = await Saved(http).make()
        await resolved(http, "/asample", **await saved.open(0), **ASKED)
        monkeypatch.setattr(named_samplers, "change_of", change_of)
        await saved.delete()
        await posted(http, "/session_heartbeat", session_id=saved.session)
        await until(lambda: backend.dropped == backend.answered)
        assert not failures


async def test_a_drained_service_opens_no_sampler_for_a_single_request(http: httpx.AsyncClient):
    saved = await Saved(http).make()
    calls = http._transport.app.state.api.client.calls  # type: ignore[attr-defined]
    await calls.set_mode("draining", "eve")
    refused = await http.post("/asample", json={"model_path": saved.path, **ASKED})
    assert refused.status_code == 503, refused.text
    opened = (await calls.status())["samplers"]
    assert opened == 0
