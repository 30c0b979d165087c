"""API keys: each sees its own objects, keys are stored as hashes, and tokens replace them."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import jwt
import numpy as np
import pytest
from tokenizers import Tokenizer, models

from skyrl_actors.api.routes_service import health
from skyrl_actors.api.state import ApiState
from skyrl_actors.config.cluster import ClusterConfig, HttpConfig, LimitsConfig
from skyrl_actors.config.load import load, to_yaml
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.messages.images import Picture
from skyrl_actors.messages.keys import KeyTable
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import SampleOutput, Sequence
from skyrl_actors.messages.weights import SamplerWeights
from tests.api.local import MODEL, AnsweringBackend, config_for, edge, posted, resolved

ALICE, BOB = "tml-alice-0123456789", "tml-bob-9876543210"


@asynccontextmanager
async def of_alice_and_bob(
    config: ClusterConfig, backend: AnsweringBackend | None = None
) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    async with (
        edge(config, backend, **{"X-API-Key": ALICE}) as alice,
        httpx.AsyncClient(
            transport=alice._transport, base_url=alice.base_url, headers={"X-API-Key": BOB}
        ) as bob,
    ):
        yield alice, bob


@pytest.fixture
async def both(tmp_path: Path):
    config = config_for(
        tmp_path,
        http=HttpConfig(api_keys=(f"alice={ALICE}", BOB), sdk={"pjwt_auth_enabled": True}),
    )
    async with of_alice_and_bob(config) as pair:
        yield pair


async def with_checkpoints(http: httpx.AsyncClient) -> tuple[str, str]:
    session = (await posted(http, "/create_session"))["session_id"]
    await resolved(http, "/create_model", session_id=session, model_seq_id=0, base_model=MODEL)
    model_id = f"{session}:train:0"
    await resolved(http, "/save_weights", model_id=model_id, path="one", seq_id=1)
    await resolved(http, "/save_weights_for_sampler", model_id=model_id, path="two", seq_id=2)
    await resolved(
        http, "/save_weights_for_sampler", model_id=model_id, sampling_session_seq_id=0, seq_id=3
    )
    return session, model_id


async def test_requests_without_a_key_are_refused(
    both: tuple[httpx.AsyncClient, httpx.AsyncClient],
):
    stranger = httpx.AsyncClient(transport=both[0]._transport, base_url=both[0].base_url)
    for headers in (
        {},
        {"X-API-Key": "tml-other"},
        {"X-API-Key": "eyJ.eyJ.x"},
        {"Authorization": "Bearer nothing"},
    ):
        answer = await stranger.post("/create_session", json={}, headers=headers)
        assert (
            answer.status_code == 401 and "invalid_token" in answer.headers["www-authenticate"]
        ), headers
    assert (
        await stranger.post("/client/config", json={})
    ).status_code == 200  # SDKs ask it before they have a token


def everything_of(session: str, model_id: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Return (method, path, body) of requests that name objects of an owner."""
    prompt = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1}}
    state, sampler = f"tinker://{model_id}/weights/one", f"tinker://{model_id}/sampler_weights/two"
    batch = {
        "data": [
            {
                "model_input": {"chunks": [{"tokens": [1]}]},
                "loss_fn_inputs": {"target_tokens": {"data": [1], "dtype": "int64"}},
            }
        ],
        "loss_fn": "cross_entropy",
    }
    here = f"/training_runs/{model_id}"
    return [
        ("POST", "/create_model", {"session_id": session, "model_seq_id": 7, "base_model": MODEL}),
        ("POST", "/get_info", {"model_id": model_id}),
        (
            "POST",
            "/forward_backward",
            {"model_id": model_id, "seq_id": 9, "forward_backward_input": batch},
        ),
        ("POST", "/forward", {"model_id": model_id, "seq_id": 9, "forward_input": batch}),
        ("POST", "/optim_step", {"model_id": model_id, "seq_id": 9}),
        ("POST", "/save_weights", {"model_id": model_id, "path": "x", "seq_id": 9}),
        ("POST", "/save_weights_for_sampler", {"model_id": model_id, "path": "x", "seq_id": 9}),
        ("POST", "/load_weights", {"model_id": model_id, "path": state, "seq_id": 9}),
        ("POST", "/unload_model", {"model_id": model_id}),
        ("POST", "/weights_info", {"tinker_path": state}),
        (
            "POST",
            "/create_sampling_session",
            {"session_id": session, "sampling_session_seq_id": 9, "base_model": MODEL},
        ),
        ("GET", f"/samplers/{session}:sample:0", {}),
        ("POST", "/asample", {"sampling_session_id": f"{session}:sample:0", **prompt}),
        ("POST", "/asample", {"model_path": sampler, **prompt}),
        ("GET", here, {}),
        ("GET", f"{here}?access_scope=accessible", {}),
        ("GET", f"{here}/checkpoints", {}),
        ("POST", f"{here}/checkpoints/weights/one/publish", {}),
        ("DELETE", f"{here}/checkpoints/weights/one/publish", {}),
        ("PUT", f"{here}/checkpoints/weights/one/ttl", {"ttl_seconds": 3600}),
        ("GET", f"{here}/checkpoints/weights/one/archive", {}),
        ("DELETE", f"{here}/checkpoints/weights/one", {}),
        ("GET", f"/sessions/{session}", {}),
        ("POST", f"/sessions/{session}/finish", {"reason": {"type": "success"}}),
    ]


async def test_objects_of_another_key_are_answered_as_unknown(
    both: tuple[httpx.AsyncClient, httpx.AsyncClient],
):
    alice, bob = both
    session, model_id = await with_checkpoints(alice)
    for method, path, body in everything_of(session, model_id):
        answer = await bob.request(method, path, json=body)
        assert answer.status_code == 404, f"{method} {path}: {answer.status_code} {answer.text}"
    assert (await bob.post("/session_heartbeat", json={"session_id": session})).status_code == 410
    asked = (await posted(alice, "/optim_step", model_id=model_id, seq_id=4))["request_id"]
    assert (await bob.post("/retrieve_future", json={"request_id": asked})).status_code == 410
    for path, key in (
        ("/sessions", "sessions"),
        ("/training_runs", "training_runs"),
        ("/checkpoints", "checkpoints"),
    ):
        assert (await bob.get(path)).json()[key] == [] and (await alice.get(path)).json()[key], path
    await posted(
        alice, "/session_heartbeat", session_id=session
    )  # nothing of all that did anything


async def test_published_checkpoints_are_readable_for_every_key(
    both: tuple[httpx.AsyncClient, httpx.AsyncClient],
):
    alice, bob = both
    _, model_id = await with_checkpoints(alice)
    state, sampler = f"tinker://{model_id}/weights/one", f"tinker://{model_id}/sampler_weights/two"
    here = f"/training_runs/{model_id}"
    for kind in ("weights/one", "sampler_weights/two"):
        assert (await alice.post(f"{here}/checkpoints/{kind}/publish")).status_code == 200
    mine = (await posted(bob, "/create_session"))["session_id"]
    loaded = await resolved(
        bob, "/load_weights", session_id=mine, model_seq_id=0, path=state, optimizer=False
    )
    assert loaded["model_id"] == f"{mine}:train:0"
    await posted(
        bob,
        "/create_sampling_session",
        session_id=mine,
        sampling_session_seq_id=0,
        model_path=sampler,
    )
    assert (await posted(bob, "/weights_info", tinker_path=state))["is_lora"]
    assert (await bob.get("/training_runs")).json()["cursor"]["total_count"] == 1
    assert (await bob.get("/training_runs?access_scope=accessible")).json()["cursor"][
        "total_count"
    ] == 2
    assert (await bob.delete(f"{here}/checkpoints/weights/one")).status_code == 404  # to read only
    await alice.delete(f"{here}/checkpoints/weights/one/publish")
    again = await bob.post(
        "/load_weights", json={"session_id": mine, "model_seq_id": 1, "path": state}
    )
    assert again.status_code == 404


async def test_an_access_token_opens_checkpoints_of_its_account(
    both: tuple[httpx.AsyncClient, httpx.AsyncClient],
):
    alice, bob = both
    _, model_id = await with_checkpoints(alice)
    mine = (await posted(bob, "/create_session"))["session_id"]
    body = {"session_id": mine, "model_seq_id": 0, "path": f"tinker://{model_id}/weights/one"}
    assert (
        await bob.post("/load_weights", json={**body, "weights_access_token": "tml-nobodys-key"})
    ).status_code == 404
    assert (await resolved(bob, "/load_weights", **body, weights_access_token=ALICE))[
        "model_id"
    ] == f"{mine}:train:0"


async def test_tokens_are_issued_checked_and_renewed(
    both: tuple[httpx.AsyncClient, httpx.AsyncClient],
):
    alice, _ = both
    session, _ = await with_checkpoints(alice)
    assert (await posted(alice, "/client/config"))["pjwt_auth_enabled"]
    token = (await posted(alice, "/auth/token"))["jwt"]
    claims = jwt.decode(token, options={"verify_signature": False})
    assert claims["exp"] - claims["iat"] == 1800 and claims["exp"] > time.time()
    answer = await alice.get("/sessions", headers={"X-API-Key": token})
    assert answer.json()["sessions"] == [session]
    head, _, signature = token.split(".")
    forged = jwt.encode({**claims, "sub": "0" * 10}, "x" * 32, "HS256").split(".")[1]
    for bad in (
        f"{head}.{forged}.{signature}",
        jwt.encode({**claims}, "y" * 32, "HS256"),
        jwt.encode({**claims}, None, "none"),
    ):
        assert (await alice.get("/sessions", headers={"X-API-Key": bad})).status_code == 401


async def test_limits_apply_to_each_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("skyrl_actors.controller.session_start.SESSIONS_PER_KEY", 2)
    limits = LimitsConfig(models_per_key=1)
    config = config_for(tmp_path, http=HttpConfig(api_keys=(ALICE, BOB)), limits=limits)
    async with of_alice_and_bob(config) as (alice, bob):
        session, _ = await with_checkpoints(alice)
        refused = await alice.post(
            "/create_model", json={"session_id": session, "model_seq_id": 1, "base_model": MODEL}
        )
        assert refused.status_code == 429 and "1 models of this API key are alive" in refused.text
        assert refused.headers["retry-after"] == "1"
        await posted(alice, "/create_session")
        assert (await alice.post("/create_session", json={})).status_code == 429
        await with_checkpoints(bob)


def test_keys_are_stored_as_hashes_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "keys"
    file.write_text(f"# who may\nalice={ALICE}\n\n{BOB} # comment\n")
    source = tmp_path / "c.yaml"
    source.write_text("{}")
    monkeypatch.setenv("SKYRL_ACTORS_API_KEYS", "carol=tml-carol-1234567890")
    config = load(source, [f"http.api_keys_file={file}"])
    assert len(config.http.api_keys) == 3 and all(
        "sha256:" in entry for entry in config.http.api_keys
    )
    for text in (to_yaml(config), repr(config), json.dumps(config.model_dump(mode="json"))):
        assert ALICE not in text and BOB not in text and "carol-1234567890" not in text
    source.write_text(to_yaml(config))
    assert load(source).http.api_keys == config.http.api_keys
    monkeypatch.setenv("SKYRL_ACTORS_API_KEYS", "short")
    with pytest.raises(ConfigError) as refused:
        load(source)
    assert "at least 8 characters" in str(refused.value) and "'short'" not in str(refused.value)


def test_the_key_command_prints_a_key_and_its_hash(tmp_path: Path):
    from typer.testing import CliRunner

    from skyrl_actors.__main__ import app

    found = CliRunner().invoke(app, ["key", "line", "alice"])
    key, line = (text.split()[1] for text in found.output.splitlines())
    assert key.startswith("tml-") and line.startswith("alice=sha256:") and key not in line
    assert HttpConfig(api_keys=(line,)).api_keys == HttpConfig(api_keys=(f"alice={key}",)).api_keys
    assert CliRunner().invoke(app, ["key", "line", "a b"]).exit_code != 0


@pytest.mark.parametrize(
    ("keys", "expected"),
    [((), "rank 0 died\nlast lines of its log"), ((f"alice={ALICE}",), "rank 0 died")],
)
async def test_log_lines_in_health_are_hidden_when_keys_are_configured(
    tmp_path: Path, keys: tuple[str, ...], expected: str
):
    class Down:
        @property
        def once(self) -> "Down":
            return self

        calls = once

        async def fault(self) -> str:
            return "rank 0 died\nlast lines of its log"

        async def known_keys(self, version: str) -> KeyTable:
            return KeyTable(version="none")

    state = ApiState(config_for(tmp_path, http=HttpConfig(api_keys=keys)), cast(Any, Down()))
    answer = await health(state)
    assert answer.status_code == 503 and json.loads(bytes(answer.body))["reason"] == expected


class Drawing(AnsweringBackend):
    """Samples tokens at random from the seed of each sample, as an engine does."""

    async def sample(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        weights: SamplerWeights,
        pictures: tuple[Picture, ...] = (),
    ) -> SampleOutput:
        assert params.seed is not None
        drawn = []
        for draw in range(params.num_samples):
            tokens = np.random.default_rng(params.seed + draw).integers(0, 256, params.max_tokens)
            drawn.append(
                Sequence(
                    tokens=tokens.astype(np.int32),
                    logprobs=np.zeros(params.max_tokens, np.float32),
                    stop_reason="length",
                )
            )
        return SampleOutput(sequences=tuple(drawn), version=weights.version)


@pytest.mark.parametrize("keys", [(), (f"alice={ALICE}", BOB)])
async def test_samples_without_a_seed_differ_and_a_retry_is_equal(
    tmp_path: Path, keys: tuple[str, ...]
):
    words = {f"t{token}": token for token in range(256)}
    Tokenizer(models.WordLevel(words, "t0")).save(str(tmp_path / "tokenizer.json"))
    config = config_for(tmp_path, http=HttpConfig(api_keys=keys))
    async with edge(config, Drawing(str(tmp_path)), **{"X-API-Key": ALICE}) as http:
        session = (await posted(http, "/create_session"))["session_id"]
        sampler = {"sampling_session_id": f"{session}:sample:0"}
        await posted(
            http,
            "/create_sampling_session",
            session_id=session,
            sampling_session_seq_id=0,
            base_model=MODEL,
        )
        body = {
            **sampler,
            "prompt": {"chunks": [{"tokens": [1, 2]}]},
            "sampling_params": {"max_tokens": 8},
        }

        async def tokens(seq_id: int) -> list[list[int]]:
            answer = await resolved(http, "/asample", **body, num_samples=4, seq_id=seq_id)
            return [sequence["tokens"] for sequence in answer["sequences"]]

        found = [await tokens(seq_id) for seq_id in range(50)]
        assert len({tuple(one) for answer in found for one in answer}) == 200
        assert [await tokens(seq_id) for seq_id in range(3)] == found[:3]
        openai = {"model": MODEL, "prompt": [[1, 2]] * 8, "n": 4, "max_tokens": 8, "logprobs": 0}
        answers = [
            await http.post("http://localhost/v1/completions", json=openai) for _ in range(2)
        ]
        texts = [
            tuple(choice["logprobs"]["tokens"])
            for answer in answers
            for choice in answer.json()["choices"]
        ]
        assert len(texts) == 64 and len(set(texts)) == 64


@pytest.mark.parametrize("place", ["../../../outside/0k", "a/b/c0k", "..:0k", "s" * 200 + "0k"])
async def test_a_copy_goes_to_no_place_that_is_not_an_id(
    both: tuple[httpx.AsyncClient, httpx.AsyncClient], tmp_path: Path, place: str
):
    alice, _ = both
    session, model_id = await with_checkpoints(alice)
    before = sorted(tmp_path.rglob("*"))
    body = {"source_path": f"tinker://{model_id}/weights/one", "model_seq_id": 5}
    answer = await alice.post("/copy_weights", json={**body, "session_id": place + session[-10:]})
    assert answer.status_code == 404 and "unknown session" in answer.text
    assert sorted(tmp_path.rglob("*")) == before


async def test_ids_that_are_paths_are_unknown_without_keys_too(tmp_path: Path):
    async with edge(config_for(tmp_path)) as anyone:
        _, model_id = await with_checkpoints(anyone)
        body = {"source_path": f"tinker://{model_id}/weights/one", "model_seq_id": 5}
        answer = await anyone.post("/copy_weights", json={**body, "session_id": "../../outside"})
        assert answer.status_code == 404 and not (tmp_path.parent / "outside_train_5").exists()


async def test_a_key_with_too_many_open_requests_is_told_and_others_are_served(tmp_path: Path):
    config = config_for(tmp_path, http=HttpConfig(api_keys=(f"alice={ALICE}", BOB)))
    backend = AnsweringBackend(str(config.checkpoint_dir))
    async with of_alice_and_bob(config, backend) as (alice, bob):
        state: ApiState = alice._transport.app.state.api  # type: ignore[attr-defined]
        assert state.open_requests.limit == 4000, "of 8,000 with two processes"
        state.open_requests.limit = 3
        _, model_id = await with_checkpoints(alice)
        backend.go.clear()
        step = await posted(alice, "/optim_step", model_id=model_id, adam_params={}, seq_id=4)
        polls = [
            asyncio.create_task(posted(alice, "/retrieve_future", request_id=step["request_id"]))
            for _ in range(3)
        ]
        async with asyncio.timeout(10):
            while not (refused := await alice.get("/get_server_capabilities")).is_error:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert refused.status_code == 429 and "3 requests of this API key" in refused.text
        assert (await bob.get("/get_server_capabilities")).is_success
        backend.go.set()
        await asyncio.gather(*polls)
        assert (await alice.get("/get_server_capabilities")).is_success
