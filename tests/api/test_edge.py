"""The HTTP application in-process: answers to unusual requests."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pyrage
import pytest

from skyrl_actors.config.cluster import HttpConfig, LimitsConfig
from tests.api.local import (
    MODEL,
    AnsweringBackend,
    config_for,
    edge,
    model_in,
    posted,
    resolved,
    silenced,
)


@pytest.fixture
async def http(tmp_path: Path):
    async with edge(config_for(tmp_path)) as made:
        yield made


@pytest.mark.parametrize(
    ("method", "path", "status", "expected"),
    [
        (
            "POST",
            "/no_such_call",
            404,
            "POST /api/v1/no_such_call is not served; "
            "GET /api/v1/openapi.json lists the served paths",
        ),
        ("DELETE", "/asample", 405, "DELETE /api/v1/asample is not served"),
        ("GET", "/training_runs/nobody", 404, "no training run 'nobody'"),
        ("GET", "/training_runs?limit=0", 422, "limit: Input should be greater than or equal to 1"),
        (
            "DELETE",
            "/training_runs/s:train:0/checkpoints/one",
            422,
            "checkpoint 'one' has no kind; put the kind in front, as in weights/one",
        ),
        ("DELETE", "/training_runs/s:train:0/checkpoints/steps/1", 422, "is no checkpoint"),
        (
            "DELETE",
            "/training_runs/s:train:0/checkpoints/weights/one",
            404,
            "no checkpoint tinker://s:train:0/weights/one",
        ),
        ("DELETE", "/training_runs/..%2f..%2fetc/checkpoints/weights/one", 404, "is not served"),
        (
            "DELETE",
            "/training_runs/s/checkpoints/weights/..%2f..%2fone",
            422,
            "is not a tinker path",
        ),
        (
            "GET",
            "/archives/s:train:0/weights/one?expires=1&signature=x",
            422,
            "was not created by this service",
        ),
        ("GET", "/training_runs/s:train:0/checkpoints/weights/one/archive", 404, "no checkpoint"),
        ("GET", "/sessions/nobody", 404, "unknown session 'nobody'"),
    ],
)
async def test_errors_of_unknown_objects_are_json(
    http: httpx.AsyncClient, method: str, path: str, status: int, expected: str
):
    answer = await http.request(method, path)
    assert answer.status_code == status and expected in answer.json()["detail"], answer.text


async def test_a_run_its_checkpoint_and_its_archive_can_be_read(http: httpx.AsyncClient):
    session = (await posted(http, "/create_session"))["session_id"]
    metadata = {"renderer_name": "qwen3"}
    fields = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": MODEL,
        "user_metadata": metadata,
    }
    assert (await resolved(http, "/create_model", **fields))["model_id"] == f"{session}:train:0"
    path = (
        await resolved(
            http,
            "/save_weights",
            model_id=f"{session}:train:0",
            path="one",
            seq_id=1,
            ttl_seconds=60,
        )
    )["path"]
    run = (await http.get(f"/training_runs/{session}:train:0")).json()
    assert (
        run["user_metadata"] == metadata
        and run["last_checkpoint"]["tinker_path"] == path
        and run["is_lora"]
    )
    (listed,) = (await http.get("/checkpoints")).json()["checkpoints"]
    assert (
        listed["checkpoint_id"] == "weights/one" and listed["expires_at"] and not listed["public"]
    )
    where = f"/training_runs/{session}:train:0/checkpoints/weights/one"
    link = await http.get(f"{where}/archive")
    assert link.status_code == 302 and "expires" in link.headers
    archive = await http.get(link.headers["location"])
    assert archive.status_code == 200 and b"model_spec.json" in archive.content
    assert (await http.delete(where)).status_code == 200
    assert (await http.get("/checkpoints")).json() == {
        "checkpoints": [],
        "cursor": {"offset": 0, "limit": 100, "total_count": 0},
    }


async def test_a_wrong_signature_of_any_characters_is_refused(
    http: httpx.AsyncClient,
):
    for given in ("é", "ſ", "\U0001f600", "a" * 64, "%00", ""):
        found = await http.get(
            "/archives/s:train:0/weights/one",
            params={"expires": 1, "signature": given, "file": given},
        )
        assert found.status_code == 422 and "was not created by this service" in found.text, given


async def test_an_archive_link_does_not_use_the_host_header(tmp_path: Path):
    keys = HttpConfig(api_keys=("ann=tml-ann-12345",))
    async with edge(config_for(tmp_path, http=keys)) as made:
        made.headers["X-API-Key"] = "tml-ann-12345"
        await archive_link(made)


async def archive_link(http: httpx.AsyncClient) -> None:
    session = (await posted(http, "/create_session"))["session_id"]
    await resolved(http, "/create_model", session_id=session, model_seq_id=0, base_model=MODEL)
    await resolved(http, "/save_weights", model_id=f"{session}:train:0", path="one", seq_id=1)
    where = f"/training_runs/{session}:train:0/checkpoints/weights/one/archive"
    link = await http.get(where, headers={"Host": "evil.example"})
    assert link.status_code == 302 and link.headers["location"].startswith(
        "http://127.0.0.1:8000/api/v1/archives/"
    )


async def test_samples_can_be_cancelled_and_polled_together(http: httpx.AsyncClient):
    session = (await posted(http, "/create_session"))["session_id"]
    sampler = {"sampling_session_id": f"{session}:sample:0"}
    await posted(
        http,
        "/create_sampling_session",
        session_id=session,
        sampling_session_seq_id=0,
        base_model=MODEL,
    )
    counters = [
        (await posted(http, "/join_sampling_session", **sampler))["client_counter"]
        for _ in range(3)
    ]
    assert (
        counters == sorted(set(counters))
        and counters[0] >= 1
        and (counters[-1] + 1) * 10**9 < 2**62
    )
    body = {
        **sampler,
        "prompt": {"chunks": [{"tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 2},
    }
    asked = [
        (await posted(http, "/asample", **body, seq_id=i))["request_id"] for i in (0, 1, 10**9)
    ]
    for request_id in asked:
        await posted(http, "/retrieve_future", request_id=request_id)
    first = await posted(http, "/retrieve_futures", target=sampler, prev_cursor=0)
    assert {one["request_id"] for one in first["completions"]} == set(asked[:2])
    later = await posted(
        http, "/retrieve_futures", target=sampler, prev_cursor=first["cursor"], timeout=0
    )
    assert later == {"completions": [], "cursor": first["cursor"]}
    copy = await posted(
        http, "/retrieve_futures", target={**sampler, "cloned_sampler_id": 1}, timeout=0
    )
    assert [one["request_id"] for one in copy["completions"]] == asked[2:]
    assert await posted(http, "/cancel_future", request_id=asked[0]) == {}
    assert "sequences" in await posted(
        http, "/retrieve_future", request_id=asked[0]
    )  # it was answered before
    assert (
        await http.post("/retrieve_futures", json={"target": {"sampling_session_id": "nobody"}})
    ).status_code == 404


async def test_a_cancelled_sample_fails_and_frees_its_slot(tmp_path: Path):
    backend = AnsweringBackend(str(tmp_path))
    backend.sampling.clear()
    async with edge(
        config_for(tmp_path, limits=LimitsConfig(samples_in_flight=1)), backend
    ) as http:
        body = {
            "base_model": MODEL,
            "prompt": {"chunks": [{"tokens": [1, 2]}]},
            "sampling_params": {"max_tokens": 2},
        }
        running, queued, last = [
            (await posted(http, "/asample", **body))["request_id"] for _ in range(3)
        ]
        await posted(http, "/cancel_future", request_id=queued)
        failed = await posted(http, "/retrieve_future", request_id=queued)
        assert failed == {"error": "cancelled by its client", "category": "user"}
        await posted(http, "/cancel_future", request_id=running)
        assert "error" in await posted(http, "/retrieve_future", request_id=running)
        backend.sampling.set()
        assert "sequences" in await posted(http, "/retrieve_future", request_id=last)


async def test_ended_sessions_can_be_searched(http: httpx.AsyncClient):
    made = []
    for name, metadata in (
        ("First of May", {"a": "1"}),
        ("second", {"a": "2"}),
        (None, {"a": "1"}),
    ):
        fields = {"display_name": name, "user_metadata": metadata}
        made.append((await posted(http, "/create_session", **fields))["session_id"])
    await posted(http, f"/sessions/{made[0]}/finish", reason={"type": "errored"}, detail="it broke")
    await posted(http, f"/sessions/{made[0]}/finish", reason={"type": "success"})

    async def found(**query: Any) -> list[str]:
        return [
            entry["session_id"]
            for entry in (await posted(http, "/sessions/search", **query))["sessions"]
        ]

    assert (await http.get("/sessions")).json()["sessions"] == made[::-1] == await found()
    assert await found(display_name="may first") == made[:1]
    assert await found(display_name="nothing", session_id=made[2]) == made[2:]
    assert await found(user_metadata={"a": "1"}) == [made[2], made[0]]
    assert await found(statuses=[{"type": "active"}]) == [made[2], made[1]]
    assert await found(statuses=[{"type": "client_finished", "reasons": ["errored"]}]) == made[:1]
    page = await posted(http, "/sessions/search", limit=2)
    assert [entry["session_id"] for entry in page["sessions"]] == [made[2], made[1]]
    rest = await posted(http, "/sessions/search", limit=2, cursor=page["next_cursor"])
    assert [entry["session_id"] for entry in rest["sessions"]] == made[:1] and rest[
        "next_cursor"
    ] is None
    assert rest["sessions"][0]["status"] == {
        "type": "client_finished",
        "reason": {"type": "errored"},
        "detail": "it broke",
    }
    one = (await http.get(f"/sessions/{made[0]}")).json()
    assert one["display_name"] == "First of May" and one["user_metadata"] == {"a": "1"}


async def test_the_tags_of_a_session_are_kept_and_shown(http: httpx.AsyncClient):
    tags = ["nightly", "team-a"]
    session = (await posted(http, "/create_session", tags=tags))["session_id"]
    assert (await http.get(f"/sessions/{session}")).json()["tags"] == tags
    (found,) = (await posted(http, "/sessions/search"))["sessions"]
    assert found["tags"] == tags
    await posted(http, f"/sessions/{session}/finish")
    assert (await http.get(f"/sessions/{session}")).json()["tags"] == tags
    answer = await http.post("/create_session", json={"tags": ["x" * 17_000]})
    assert answer.status_code == 422 and "tags have 17000 bytes" in answer.text


async def test_exports_can_be_downloaded_but_not_loaded(http: httpx.AsyncClient):
    _, model_id = await model_in(http)
    saved = await resolved(
        http, "/save_weights_external", model_id=model_id, path="out", seq_id=1, ttl_seconds=3600
    )
    assert saved["path"] == f"tinker://{model_id}/external_weights/out" and saved["size_bytes"] > 0
    urls = (
        await http.get(
            f"/training_runs/{model_id}/checkpoints/external_weights/out/external_weights_urls"
        )
    ).json()["urls"]
    assert set(urls) == {"weights.bin"}
    assert (await http.get(urls["weights.bin"])).content == b"weights"
    for stolen in (
        urls["weights.bin"].replace("weights.bin", "model_spec.json"),
        urls["weights.bin"].split("&file=")[0],
    ):
        assert (await http.get(stolen)).status_code == 422
    (listed,) = (await http.get("/checkpoints")).json()["checkpoints"]
    assert listed["checkpoint_type"] == "external"
    old = await http.get("/checkpoints", headers={"User-Agent": "AsyncTinker/Python 0.27.1"})
    assert old.json()["checkpoints"] == []
    loading = await resolved(http, "/load_weights", model_id=model_id, path=saved["path"], seq_id=2)
    assert "was written for other tools" in loading["error"] and loading["category"] == "user"


async def test_exports_are_encrypted_for_their_recipients(http: httpx.AsyncClient, tmp_path: Path):
    _, model_id = await model_in(http)
    identity = pyrage.x25519.Identity.generate()
    body = {"model_id": model_id, "path": "out"}
    keys = {"age_encryption_recipients": [str(identity.to_public())]}
    saved = await resolved(http, "/save_weights_external", **body, **keys, seq_id=1)
    place = f"/training_runs/{model_id}/checkpoints/external_weights/out/external_weights_urls"
    urls = (await http.get(place)).json()["urls"]
    assert set(urls) == {"weights.bin.age"}
    content = (await http.get(urls["weights.bin.age"])).content
    assert pyrage.decrypt(content, [identity]) == b"weights"
    assert saved["size_bytes"] == len(content)
    assert not list(tmp_path.rglob("weights.bin")), "no copy is left in the clear"
    for wrong in (["age1"], ["ssh-ed25519 x"], keys["age_encryption_recipients"] * 65):
        refused = await http.post(
            "/save_weights_external", json={**body, "age_encryption_recipients": wrong}
        )
        assert refused.status_code == 422 and "age_encryption_recipients" in refused.text


async def test_weights_are_copied_to_another_run_once(http: httpx.AsyncClient):
    session, model_id = await model_in(http)
    path = (await resolved(http, "/save_weights", model_id=model_id, path="one", seq_id=1))["path"]
    into = {"source_path": path, "session_id": session, "model_seq_id": 5, "ttl_seconds": 3600}
    assert await posted(http, "/copy_weights", **into) == {
        "tinker_path": f"tinker://{session}:train:5/weights/one"
    }
    assert await posted(http, "/copy_weights", **into) == {
        "tinker_path": f"tinker://{session}:train:5/weights/one"
    }
    assert (
        await http.post("/copy_weights", json={**into, "model_seq_id": 0})
    ).status_code == 400  # its own place
    body, key = {"source_path": path, "destination_project_id": "p"}, {"X-Idempotency-Key": "k1"}
    first, again = [
        (await http.post("/copy_weights", json=body, headers=key)).json()["tinker_path"]
        for _ in range(2)
    ]
    assert first == again != path
    copies = [
        entry["tinker_path"] for entry in (await http.get("/checkpoints")).json()["checkpoints"]
    ]
    assert sorted(copies) == sorted([path, f"tinker://{session}:train:5/weights/one", first])
    made = await resolved(
        http, "/load_weights", session_id=session, model_seq_id=6, path=first, optimizer=True
    )
    assert made["model_id"] == f"{session}:train:6"
    for bad, status in (
        ({"source_path": path}, 422),
        ({**into, "source_path": "tinker://a/weights/b"}, 404),
    ):
        assert (await http.post("/copy_weights", json=bad)).status_code == status


@pytest.mark.parametrize(
    "path", ["/forward_backward", "/asample", "/create_session", "/v1/completions"]
)
async def test_an_incomplete_body_has_no_effect(
    http: httpx.AsyncClient, path: str, caplog: pytest.LogCaptureFixture
):
    """Send what the server below the application sends when a client disconnects half-way."""
    app = http._transport.app  # type: ignore[attr-defined]
    where = path if path.startswith("/v1") else f"/api/v1{path}"
    scope = {
        "type": "http",
        "method": "POST",
        "path": where,
        "raw_path": where.encode(),
        "query_string": b"",
        "http_version": "1.1",
        "headers": [
            (b"content-length", b"500"),
            (b"content-type", b"application/json"),
            (b"x-api-key", b"tml-secret-key"),
        ],
        "app": app,
        "root_path": "",
        "scheme": "http",
        "server": ("service", 80),
        "client": ("127.0.0.1", 1),
    }
    messages = [
        {"type": "http.request", "body": b'{"model_id": "x", ', "more_body": True},
        {"type": "http.disconnect"},
    ]
    answers = []

    async def receive() -> Any:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        answers.append(message)

    await app(scope, receive, send)
    assert answers[0]["status"] == 400
    assert not [
        record
        for record in caplog.records
        if record.levelname == "ERROR" or "tml-secret-key" in record.getMessage()
    ]


async def test_a_flooding_session_does_not_starve_another(tmp_path: Path):
    backend = AnsweringBackend(str(tmp_path))
    backend.sample_s = 0.005
    async with edge(
        config_for(tmp_path, limits=LimitsConfig(samples_in_flight=2)), backend
    ) as http:

        async def asked(count: int) -> list[str]:
            session = (await posted(http, "/create_session"))["session_id"]
            await posted(
                http,
                "/create_sampling_session",
                session_id=session,
                sampling_session_seq_id=0,
                base_model=MODEL,
            )
            body = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1}}
            sampler = f"{session}:sample:0"
            return [
                (await posted(http, "/asample", sampling_session_id=sampler, seq_id=i, **body))[
                    "request_id"
                ]
                for i in range(count)
            ]

        backend.sampling.clear()
        flood, small = await asked(200), await asked(2)
        backend.sampling.set()
        for request_id in small:
            assert "sequences" in await posted(http, "/retrieve_future", request_id=request_id)
        waiting = sum(request_id not in backend.sampled for request_id in flood)
        assert waiting > 150, "the small session was answered while most of the flood waited"
        for request_id in flood:
            assert "sequences" in await posted(http, "/retrieve_future", request_id=request_id)


async def test_values_that_cannot_be_stored_are_refused_with_422_and_health_stays_ok(
    http: httpx.AsyncClient,
):
    session, model_id = await model_in(http)
    for path, body in (
        (
            "/create_model",
            {
                "session_id": session,
                "model_seq_id": 1,
                "base_model": MODEL,
                "lora_config": {"seed": 2**70},
            },
        ),
        ("/create_model", {"session_id": session, "model_seq_id": 10**600, "base_model": MODEL}),
        (
            "/create_model",
            {
                "session_id": session,
                "model_seq_id": 1,
                "base_model": MODEL,
                "user_metadata": {"a": "\ud800"},
            },
        ),
        ("/save_weights", {"model_id": model_id, "path": "a\ud800"}),
        ("/save_weights", {"model_id": model_id, "path": "a", "ttl_seconds": 10**15}),
        ("/save_weights_for_sampler", {"model_id": model_id, "sampling_session_seq_id": 10**600}),
        (
            "/asample",
            {
                "base_model": "\ud800",
                "prompt": {"chunks": [{"tokens": [1]}]},
                "sampling_params": {"max_tokens": 1},
            },
        ),
    ):
        answer = await http.post(
            path, content=json.dumps(body), headers={"content-type": "application/json"}
        )
        assert answer.status_code == 422, (path, body, answer.text)
        assert (await http.get("/healthz")).status_code == 200
    await resolved(http, "/optim_step", model_id=model_id, seq_id=1)


async def test_a_model_of_an_expired_session_is_loaded_from_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    silent = silenced(monkeypatch)
    async with edge(config_for(tmp_path, limits=LimitsConfig(session_timeout_s=0.5))) as http:
        session, model_id = await model_in(http)
        await resolved(http, "/optim_step", model_id=model_id, seq_id=1)
        silent.append(session)
        for _ in range(200):
            if (
                gone := (await http.post("/get_info", json={"model_id": model_id})).status_code
                == 404
            ):
                break
            await asyncio.sleep(0.1)
        assert gone
        assert (
            await http.post("/session_heartbeat", json={"session_id": session})
        ).status_code == 410
        fresh = (await posted(http, "/create_session"))["session_id"]
        path = f"tinker://{model_id}/steps/1"
        found = await resolved(
            http, "/load_weights", session_id=fresh, model_seq_id=0, path=path, optimizer=True
        )
        assert found["model_id"] == f"{fresh}:train:0" and found["path"] == path


async def test_a_refused_forward_backward_leaves_nothing_behind(tmp_path: Path):
    """Its number stays free for the corrected one, and a step applies what was accepted."""
    async with edge(config_for(tmp_path)) as http:
        _, model_id = await model_in(http)
        datum = {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "loss_fn_inputs": {"target_tokens": {"data": [2, 3, 4], "dtype": "int64"}},
        }
        right = {"data": [datum], "loss_fn": "cross_entropy"}
        wrong = {"data": [datum], "loss_fn": "importance_sampling"}  # without advantages
        refused = await http.post(
            "/forward_backward",
            json={"model_id": model_id, "seq_id": 1, "forward_backward_input": wrong},
        )
        assert refused.status_code in (400, 422), refused.text
        adam = {"learning_rate": 1e-3}
        await resolved(http, "/optim_step", model_id=model_id, seq_id=2, adam_params=adam)
        await resolved(
            http, "/forward_backward", model_id=model_id, seq_id=1, forward_backward_input=right
        )
        await resolved(http, "/optim_step", model_id=model_id, seq_id=3, adam_params=adam)
