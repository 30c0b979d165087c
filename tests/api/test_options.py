"""Options of requests that must take effect or be refused, with the application in-process."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.local import MODEL, config_for, edge, posted, resolved

PROMPT = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": {"max_tokens": 2}}
CHECKPOINT = "tinker://s:train:0/weights/a"


@pytest.fixture
async def http(tmp_path: Path):
    async with edge(config_for(tmp_path)) as made:
        yield made


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (
            "/create_model",
            {"lora_config": {"rank": 0, "train_mlp": False}},
            "rank 0 is a full fine-tune, which trains all weights",
        ),
        (
            "/create_model",
            {"optimizer_config": {"type": "adamw", "version": 1}},
            "optimizer_config.version: ",
        ),
        (
            "/optim_step",
            {"optimizer_params": {"type": "dimuon", "learning_rate": 0.1}},
            "optimizer_params of type 'dimuon' is refused; choose adamw, adamw8bit or muon with "
            "optimizer_config of create_model",
        ),
        (
            "/load_weights",
            {"path": CHECKPOINT, "session_id": "s", "model_seq_id": 1},
            "model_id and session_id are both given",
        ),
        (
            "/load_weights",
            {"path": CHECKPOINT, "base_model": MODEL},
            "base_model is for a new model; leave it out with model_id",
        ),
        (
            "/load_weights",
            {"path": CHECKPOINT, "user_metadata": {"a": "b"}},
            "user_metadata is for a new model; leave it out with model_id",
        ),
        (
            "/load_weights",
            {"path": CHECKPOINT, "optimizer_config": {"type": "adamw"}},
            "optimizer_config is for a new model; leave it out with model_id",
        ),
        (
            "/save_weights_for_sampler",
            {"sampling_session_seq_id": 3, "ttl_seconds": 60},
            "ttl_seconds is for a checkpoint with a name; give path, or leave ttl_seconds out",
        ),
        (
            "/save_weights_for_sampler",
            {"sampling_session_seq_id": 3, "user_metadata": {"a": "b"}},
            "user_metadata is for a checkpoint with a name; give path, or leave user_metadata out",
        ),
        (
            "/copy_weights",
            {
                "source_path": CHECKPOINT,
                "session_id": "s",
                "model_seq_id": 1,
                "destination_project_id": "p",
            },
            "session_id and destination_project_id are both given",
        ),
        (
            "/copy_weights",
            {"source_path": CHECKPOINT, "session_id": "s", "destination_project_id": "p"},
            "session_id and destination_project_id are both given",
        ),
        (
            "/asample",
            {**PROMPT, "sampling_session_id": "s:sample:0", "model_path": CHECKPOINT},
            "sampling_session_id and model_path are both given",
        ),
        (
            "/asample",
            {**PROMPT, "sampling_session_id": "s:sample:0", "base_model": MODEL},
            "sampling_session_id and base_model are both given",
        ),
        (
            "/sessions/search",
            {"owner": {"type": "user", "owner_urns": ["u"]}},
            "owner.type: Input should be 'own' or 'accessible'",
        ),
        ("/sessions/search", {"statuses": [{"type": "over"}]}, "statuses.0.type: "),
        ("/sessions/search", {"statuses": []}, "statuses: "),
        (
            "/optim_step",
            {"adam_params": {"learning_rate": None}},
            "learning_rate is null, which stands for NaN or an infinite number",
        ),
        (
            "/asample",
            {**PROMPT, "sampling_params": {"temperature": None}},
            "temperature is null, which stands for NaN",
        ),
    ],
)
async def test_an_option_without_effect_is_refused_by_name(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], expected: str
):
    session = (await posted(http, "/create_session"))["session_id"]
    await resolved(http, "/create_model", session_id=session, model_seq_id=0, base_model=MODEL)
    own = {
        "/create_model": {"session_id": session, "model_seq_id": 9, "base_model": MODEL},
        "/optim_step": {"model_id": f"{session}:train:0"},
        "/load_weights": {"model_id": f"{session}:train:0"},
        "/save_weights_for_sampler": {"model_id": f"{session}:train:0"},
    }
    answer = await http.post(path, json={**own.get(path, {}), **body})
    assert answer.status_code == 422 and expected in answer.json()["detail"], answer.text


async def test_a_project_is_kept_with_its_sessions_and_limits_lists(http: httpx.AsyncClient):
    without = (await posted(http, "/create_session"))["session_id"]
    session = (await posted(http, "/create_session", project_id="p"))["session_id"]
    (found,) = (await posted(http, "/sessions/search", project_ids=["p"]))["sessions"]
    assert (found["session_id"], found["project_id"]) == (session, "p")
    (found,) = (await posted(http, "/sessions/search", project_ids=["local"]))["sessions"]
    assert (found["session_id"], found["project_id"]) == (without, "local")
    assert (await posted(http, "/sessions/search", project_ids=[]))["sessions"] == []
    assert (await http.get(f"/sessions/{session}")).json()["project_id"] == "p"


async def test_training_runs_are_limited_to_a_project(http: httpx.AsyncClient):
    for project in ("p", "q"):
        session = (await posted(http, "/create_session", project_id=project))["session_id"]
        created = await posted(
            http, "/create_model", session_id=session, model_seq_id=0, base_model="Qwen/Qwen3-8B"
        )
        await posted(http, "/retrieve_future", request_id=created["request_id"])
        runs = (await http.get(f"/training_runs?project_id={project}")).json()["training_runs"]
        assert [run["training_run_id"] for run in runs] == [f"{session}:train:0"]
    assert len((await http.get("/training_runs")).json()["training_runs"]) == 2
    assert (await http.get("/training_runs?project_id=r")).json()["training_runs"] == []


async def test_a_model_from_a_checkpoint_takes_the_given_base_model_and_optimizer(
    http: httpx.AsyncClient,
):
    session = (await posted(http, "/create_session"))["session_id"]
    new = {"session_id": session, "base_model": MODEL}
    muon = {"optimizer_config": {"type": "muon"}}
    created = await resolved(http, "/create_model", **new, **muon, model_seq_id=0)
    saved = await resolved(http, "/save_weights", model_id=created["model_id"], path="a", seq_id=1)
    made: list[str] = []
    for i, (more, optimizer) in enumerate(
        (
            ({"optimizer": False}, "muon"),
            ({"optimizer": False, "optimizer_config": {"type": "adamw"}}, "adamw"),
            ({"optimizer": True, **muon}, "muon"),
        ),
        start=1,
    ):
        loaded = await resolved(
            http, "/load_weights", **new, **more, model_seq_id=i, path=saved["path"]
        )
        made.append(loaded["model_id"])
        info = await posted(http, "/get_info", model_id=made[-1])
        assert info["optimizer_config"] == {"type": optimizer}, more
    for more, expected in (
        ({"base_model": "other"}, "leave base_model out"),
        ({"optimizer": True, "optimizer_config": {"type": "adamw"}}, "leave optimizer_config out"),
    ):
        body = {**new, "model_seq_id": 9, "path": saved["path"], **more}
        answer = await http.post("/load_weights", json=body)
        assert answer.status_code == 422 and expected in answer.json()["detail"], answer.text


async def test_requested_top_logprobs_of_samples_are_in_json_too(http: httpx.AsyncClient):
    body = {**PROMPT, "base_model": MODEL, "topk_sample_logprobs": 2}
    (sequence,) = (await resolved(http, "/asample", **body))["sequences"]
    assert sequence["topk_logprobs"] == [[[7, -1.0], [7, -1.0]]] * 2


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"store": True}, "store is not served"),
        ({"metadata": {"a": "b"}}, "metadata is not served"),
        ({"service_tier": "flex"}, "service_tier is not served"),
        ({"tool_calls": [{"id": "1"}]}, "messages.0.tool_calls"),
        ({"refusal": "no"}, "messages.0.refusal"),
        ({"content": [{"type": "text", "text": "a", "x": 1}]}, "0.text.x"),
    ],
)
async def test_openai_fields_that_are_not_served_are_refused_by_name(
    http: httpx.AsyncClient, body: dict[str, Any], expected: str
):
    message = {"role": "user", "content": "a"}
    own = {"model": MODEL, "messages": [message]}
    if body.keys() & {"tool_calls", "refusal", "content"}:
        own, body = {"model": MODEL, "messages": [message | body]}, {}
    answer = await http.post("http://localhost/v1/chat/completions", json=own | body)
    assert answer.status_code == 400, answer.text
    assert expected in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
async def test_numbers_that_json_does_not_have_are_refused(http: httpx.AsyncClient, number: str):
    session = (await posted(http, "/create_session"))["session_id"]
    await resolved(http, "/create_model", session_id=session, model_seq_id=0, base_model=MODEL)
    body = f'{{"model_id": "{session}:train:0", "adam_params": {{"learning_rate": {number}}}}}'
    headers = {"content-type": "application/json"}
    answer = await http.post("/optim_step", content=body, headers=headers)
    assert answer.status_code == 422 and "learning_rate" in answer.json()["detail"]
