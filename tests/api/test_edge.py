"""The HTTP application in-process: what odd requests are told."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from skyrl_actors.api.app import build_app
from skyrl_actors.api.client import ControllerClient
from skyrl_actors.api.state import ApiState
from skyrl_actors.config.cluster import ClusterConfig, JournalConfig, TinyBase
from skyrl_actors.controller.controller import Controller
from skyrl_actors.journal.journal import SqlJournal
from tests.api.local import MODEL, AnsweringBackend, LocalHandle


@pytest.fixture
async def http(tmp_path: Path):
    config = ClusterConfig(
        base_model=TinyBase(name=MODEL), checkpoint_dir=tmp_path / "c", journal=JournalConfig(folder=tmp_path / "journal")
    )
    controller = Controller(config, AnsweringBackend(str(tmp_path)), SqlJournal(config.journal))
    await controller.start()
    client: Any = ControllerClient(LocalHandle(controller))  # pyright: ignore[reportArgumentType]
    transport = httpx.ASGITransport(build_app(ApiState(config, client)), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://service/api/v1") as made:
        yield made
    await controller.close()


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("POST", "/copy_weights", 404, "POST /api/v1/copy_weights is not served; GET /api/v1/openapi.json lists what is"),
        ("DELETE", "/asample", 405, "DELETE /api/v1/asample is not served"),
        ("GET", "/training_runs/nobody", 404, "no training run 'nobody'"),
        ("GET", "/training_runs?limit=0", 422, "limit: Input should be greater than or equal to 1"),
        ("DELETE", "/training_runs/s:train:0/checkpoints/one", 422, "its id has its kind in front, as in weights/one"),
        ("DELETE", "/training_runs/s:train:0/checkpoints/steps/1", 422, "is no checkpoint"),
        ("DELETE", "/training_runs/s:train:0/checkpoints/weights/one", 404, "no checkpoint tinker://s:train:0/weights/one"),
        ("DELETE", "/training_runs/..%2f..%2fetc/checkpoints/weights/one", 404, "is not served"),
        ("DELETE", "/training_runs/s/checkpoints/weights/..%2f..%2fone", 422, "is not a tinker path"),
        ("GET", "/archives/s:train:0/weights/one?expires=1&signature=x", 422, "was not given out by the service"),
        ("GET", "/training_runs/s:train:0/checkpoints/weights/one/archive", 404, "no checkpoint"),
        ("GET", "/sessions/nobody", 404, "unknown session 'nobody'"),
    ],
)
async def test_what_is_not_there_is_said_as_json(http: httpx.AsyncClient, method: str, path: str, status: int, said: str):
    answer = await http.request(method, path)
    assert answer.status_code == status and said in answer.json()["detail"], answer.text


async def test_a_run_its_checkpoint_and_its_archive(http: httpx.AsyncClient):
    async def posted(where: str, /, **body: Any) -> Any:
        answer = await http.post(where, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    session = (await posted("/create_session"))["session_id"]
    metadata = {"renderer_name": "qwen3"}
    made = await posted("/create_model", session_id=session, model_seq_id=0, base_model=MODEL, user_metadata=metadata)
    assert (await posted("/retrieve_future", request_id=made["request_id"]))["model_id"] == f"{session}:train:0"
    saved = await posted("/save_weights", model_id=f"{session}:train:0", path="one", seq_id=1, ttl_seconds=60)
    path = (await posted("/retrieve_future", request_id=saved["request_id"]))["path"]
    run = (await http.get(f"/training_runs/{session}:train:0")).json()
    assert run["user_metadata"] == metadata and run["last_checkpoint"]["tinker_path"] == path and run["is_lora"]
    (listed,) = (await http.get("/checkpoints")).json()["checkpoints"]
    assert listed["checkpoint_id"] == "weights/one" and listed["expires_at"] and not listed["public"]
    where = f"/training_runs/{session}:train:0/checkpoints/weights/one"
    link = await http.get(f"{where}/archive")
    assert link.status_code == 302 and "expires" in link.headers
    archive = await http.get(link.headers["location"])
    assert archive.status_code == 200 and b"model_spec.json" in archive.content
    assert (await http.delete(where)).status_code == 200
    assert (await http.get("/checkpoints")).json() == {"checkpoints": [], "cursor": {"offset": 0, "limit": 100, "total_count": 0}}
