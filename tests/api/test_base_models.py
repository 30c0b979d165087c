"""A service with several base models: each request is checked and answered by its own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tinker import types

from skyrl_actors.backends.backend import ServedModels
from skyrl_actors.config.cluster import ClusterConfig, JournalConfig
from skyrl_actors.controller import named_samplers
from skyrl_actors.messages.weights import SamplerWeights
from tests.api.local import AnsweringBackend, edge, posted, resolved
from tests.api.test_pictures import FORM, as_json, datum, encoded, image, text
from tests.api.test_usage import window

COUNT = 6  # tokens of the image

FIRST, OTHER = "first", "other"


class TwoBases(AnsweringBackend):
    """The first takes images and 512 tokens, the other neither."""

    wait: str | None = None

    def __init__(self, folder: str):
        super().__init__(folder)
        self.opened: list[str] = []

    async def start(self, epoch: int) -> Any:
        able = (await super().start(epoch)).default
        other = replace(able, base_model=OTHER, max_sample_tokens=64, max_context_tokens=32)
        return ServedModels((replace(able, base_model=FIRST, images=FORM), other))

    async def open_sampler(self, base_model: str, folder: str, version: str) -> SamplerWeights:
        self.opened.append(base_model)
        return SamplerWeights(version=version, base_model=base_model)

    def waiting(self, base_model: str, request_id: str = "") -> str | None:
        return self.wait if base_model == OTHER else None


@pytest.fixture
def backend(tmp_path: Path) -> TwoBases:
    return TwoBases(str(tmp_path))


def config_of(folder: Path) -> ClusterConfig:
    return ClusterConfig(
        base_models={
            "first": {"base_model": {"type": "tiny", "name": FIRST}},
            "other": {
                "base_model": {"type": "tiny", "name": OTHER},
                "lora": {"max_rank": 8, "alpha": 16.0, "max_full_models": 0},
            },
        },
        checkpoint_dir=folder / "checkpoints",
        journal=JournalConfig(folder=folder / "journal"),
    )


async def model_of(http: httpx.AsyncClient, base: str, number: int = 0, **more: Any) -> str:
    session = (await posted(http, "/create_session"))["session_id"]
    body = {"lora_config": {"rank": 4}, **more, "session_id": session, "base_model": base}
    await resolved(http, "/create_model", model_seq_id=number, **body)
    return f"{session}:train:{number}"


async def test_all_base_models_are_listed_and_unknown_ones_named(tmp_path: Path, backend: TwoBases):
    async with edge(config_of(tmp_path), backend) as http:
        listed = (await http.get("/get_server_capabilities")).json()["supported_models"]
        assert [one["model_name"] for one in listed] == [FIRST, OTHER]
        assert [one["max_context_length"] for one in listed] == [512, 64]
        models = (await http.get("http://localhost/v1/models")).json()["data"]
        assert [one["id"] for one in models] == [FIRST, OTHER]
        session = (await posted(http, "/create_session"))["session_id"]
        refused = await http.post(
            "/create_model", json={"session_id": session, "model_seq_id": 0, "base_model": "third"}
        )
        assert refused.status_code == 422
        assert "this service has 'first', 'other'" in refused.text


async def test_models_are_checked_by_the_config_of_their_base(tmp_path: Path, backend: TwoBases):
    async with edge(config_of(tmp_path), backend) as http:
        session = (await posted(http, "/create_session"))["session_id"]
        body: dict[str, Any] = {"session_id": session, "model_seq_id": 0, "base_model": OTHER}
        refused = await http.post("/create_model", json={**body, "lora_config": {"rank": 16}})
        assert refused.status_code == 422 and "takes 1 to 8" in refused.text
        refused = await http.post("/create_model", json={**body, "lora_config": {"rank": 0}})
        assert refused.status_code == 422 and "no full fine-tunes" in refused.text
        first = await model_of(http, FIRST, lora_config={"rank": 16})
        other = await model_of(http, OTHER, lora_config={"rank": 8})
        alphas = [backend.models[name].lora for name in (first, other)]
        assert [lora and lora.alpha for lora in alphas] == [32.0, 16.0]
        info = await posted(http, "/get_info", model_id=other)
        assert info["model_data"]["model_name"] == OTHER


def batch(model_id: str, *rows: Any) -> dict[str, Any]:
    given = {"data": [as_json(row) for row in rows], "loss_fn": "cross_entropy"}
    return {"model_id": model_id, "forward_backward_input": given}


async def test_batches_are_checked_by_their_base_model(tmp_path: Path, backend: TwoBases):
    async with edge(config_of(tmp_path), backend) as http:
        first, other = await model_of(http, FIRST), await model_of(http, OTHER)
        long = datum(text(*range(1, 41)), length=40)
        await resolved(http, "/forward_backward", **batch(first, long))
        refused = await http.post("/forward_backward", json=batch(other, long))
        assert refused.status_code == 422 and "other takes 32" in refused.text
        seen = datum(text(3), image(encoded(), expected=COUNT), length=1 + COUNT)
        await resolved(http, "/forward_backward", **batch(first, seen))
        refused = await http.post("/forward_backward", json=batch(other, seen))
        assert refused.status_code == 422 and "takes no images" in refused.text
        unknown = await http.post("/forward_backward", json=batch("nobody", seen))
        assert unknown.status_code == 404, unknown.text


async def test_samples_use_the_base_model_of_their_sampler(tmp_path: Path, backend: TwoBases):
    async with edge(config_of(tmp_path), backend) as http:
        other = await model_of(http, OTHER)
        session = other.partition(":")[0]
        await resolved(http, "/save_weights_for_sampler", model_id=other, path="saved")
        path = f"tinker://{other}/sampler_weights/saved"
        samplers = [
            await posted(http, "/create_sampling_session", session_id=session, **which)
            for which in (
                {"sampling_session_seq_id": 0, "base_model": FIRST},
                {"sampling_session_seq_id": 1, "base_model": OTHER},
                {"sampling_session_seq_id": 2, "model_path": path},
            )
        ]
        assert backend.opened == [OTHER]
        for opened, fits in zip(samplers, (True, False, False), strict=True):
            asked = {
                "sampling_session_id": opened["sampling_session_id"],
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1] * 40}]},
                "sampling_params": {"max_tokens": 30},
            }
            answer = await http.post("/asample", json=asked)
            assert (answer.status_code == 200) == fits, answer.text
            assert fits or "64" in answer.text
        wrong = await http.post(
            "/create_sampling_session",
            json={
                "session_id": session,
                "sampling_session_seq_id": 3,
                "base_model": FIRST,
                "model_path": path,
            },
        )
        assert wrong.status_code == 422 and "belongs to base model 'other'" in wrong.text


async def test_a_model_starts_from_a_checkpoint_of_its_own_base_model(
    tmp_path: Path, backend: TwoBases
):
    async with edge(config_of(tmp_path), backend) as http:
        other = await model_of(http, OTHER)
        await resolved(http, "/save_weights", model_id=other, path="saved")
        session = (await posted(http, "/create_session"))["session_id"]
        loaded = {
            "session_id": session,
            "model_seq_id": 0,
            "path": f"tinker://{other}/weights/saved",
        }
        await resolved(http, "/load_weights", **loaded, optimizer=False)
        assert backend.models[f"{session}:train:0"].base_model == OTHER


async def test_samplers_of_an_earlier_version_keep_their_base_model(
    tmp_path: Path, backend: TwoBases, monkeypatch: pytest.MonkeyPatch
):
    """It wrote the base model of a sampler, and not of its weights."""
    config = config_of(tmp_path)

    def without_base(version: str, **_: str) -> SamplerWeights:
        return SamplerWeights(version=version)

    monkeypatch.setattr(named_samplers, "SamplerWeights", without_base)
    async with edge(config, backend) as http:
        session = (await posted(http, "/create_session"))["session_id"]
        opened = {"session_id": session, "sampling_session_seq_id": 0, "base_model": OTHER}
        sampler = (await posted(http, "/create_sampling_session", **opened))["sampling_session_id"]
    used: list[str] = []

    class Noting(TwoBases):
        async def sample(self, *arguments: Any) -> Any:  # type: ignore[override]
            used.append(arguments[3].base_model)
            return await super().sample(*arguments)

    async with edge(config, Noting(str(tmp_path))) as http:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
        asked = {"sampling_session_id": sampler, "prompt": prompt}
        await resolved(http, "/asample", **asked, sampling_params={"max_tokens": 1})
    assert used == [OTHER]


async def test_a_waiting_client_reads_why(tmp_path: Path, backend: TwoBases):
    async with edge(config_of(tmp_path), backend) as http:
        other = await model_of(http, OTHER)
        backend.wait = "base model other waits for the devices, about 7 s"
        backend.go.clear()
        asked = await posted(http, "/optim_step", model_id=other, adam_params={})
        answer = await http.post(
            "/retrieve_future", json={"request_id": asked["request_id"]}, timeout=60
        )
        assert answer.status_code == 408 and answer.json()["queue_state"] == "paused_capacity"
        assert answer.json()["queue_state_reason"] == backend.wait
        backend.go.set()


async def test_usage_is_counted_for_each_base_model(tmp_path: Path, backend: TwoBases):
    async with edge(config_of(tmp_path), backend) as http:
        for base in (FIRST, OTHER, OTHER):
            model = await model_of(http, base)
            await resolved(http, "/forward_backward", **batch(model, datum(text(1, 2), length=2)))
        answer = await http.get("/billing/usage/events", params=window())
    counted = {FIRST: 0, OTHER: 0}
    for event in types.BillingUsageResponse.model_validate(answer.json()).data:
        if event.event_info.type == "training":
            counted[event.base_model or ""] += event.event_info.token_count
    assert counted == {FIRST: 2, OTHER: 4}
