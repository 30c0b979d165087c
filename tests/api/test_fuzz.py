"""Any request to any endpoint gets an answer that is no server error.

No request returns 5xx or hangs, each answer is JSON with a reason, and the service continues.
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import zstandard
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from skyrl_actors.api import schema
from skyrl_actors.api.app import build_app
from skyrl_actors.config.cluster import LimitsConfig
from tests.api.local import MODEL, config_for, edge, posted, resolved

ROUTES = [
    (method, route.path, route)
    for route in build_app().routes
    if isinstance(route, APIRoute)
    for method in sorted(route.methods)
]
ANSWER_S = 20.0
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 9),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=5).map(repr),
)
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@dataclass
class World:
    """A service with a model and checkpoints, and their ids."""

    run: asyncio.Runner
    http: httpx.AsyncClient
    known: list[str]

    def request(self, method: str, path: str, **parts: Any) -> httpx.Response:
        return self.run.run(asyncio.wait_for(self.http.request(method, path, **parts), ANSWER_S))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "checkpoints").mkdir()
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]")).save(
        str(folder / "checkpoints" / "tokenizer.json")
    )
    config = config_for(folder, limits=LimitsConfig(models_per_key=100_000, body_bytes=2**20))
    with asyncio.Runner() as run, pytest.MonkeyPatch.context() as patch:
        patch.setattr("skyrl_actors.api.state.LONG_POLL_S", 0.05)
        patch.setattr("skyrl_actors.controller.session_start.SESSIONS_PER_KEY", 100_000)
        context = edge(config)
        http = run.run(context.__aenter__())
        yield World(run, http, run.run(_furnished(http)))
        run.run(context.__aexit__(None, None, None))


async def _furnished(http: httpx.AsyncClient) -> list[str]:
    session = (await posted(http, "/create_session"))["session_id"]
    await resolved(http, "/create_model", session_id=session, model_seq_id=0, base_model=MODEL)
    model_id = f"{session}:train:0"
    path = (await resolved(http, "/save_weights", model_id=model_id, path="one"))["path"]
    sampler = (await resolved(http, "/save_weights_for_sampler", model_id=model_id, path="two"))[
        "path"
    ]
    await posted(
        http,
        "/create_sampling_session",
        session_id=session,
        sampling_session_seq_id=0,
        base_model=MODEL,
    )
    return [
        session,
        model_id,
        path,
        sampler,
        f"{session}:sample:0",
        MODEL,
        "weights/one",
        "cross_entropy",
        "ppo",
        "encoded_text",
    ]


def body_of(route: APIRoute) -> type[BaseModel] | None:
    models = [p.field_info.annotation for p in route.dependant.body_params]
    return (
        models[0]
        if models and isinstance(models[0], type) and issubclass(models[0], BaseModel)
        else None
    )


def values(known: list[str]) -> st.SearchStrategy[Any]:
    """Any JSON, often with known or similar ids."""
    tensor = st.fixed_dictionaries(
        {
            "data": st.lists(st.one_of(st.integers(-1, 400), st.floats(), LEAVES), max_size=4),
            "dtype": st.sampled_from(["int64", "float32", "x"]),
        },
        optional={
            "shape": st.lists(st.integers(-1, 5), max_size=3),
            "sparse_crow_indices": st.lists(st.integers(-1, 4), max_size=4),
            "sparse_col_indices": st.lists(st.integers(-1, 4), max_size=4),
        },
    )
    chunks = st.fixed_dictionaries(
        {
            "chunks": st.lists(
                st.fixed_dictionaries({"tokens": st.lists(st.integers(-1, 400), max_size=4)}),
                max_size=2,
            )
        }
    )
    datum = st.fixed_dictionaries(
        {
            "model_input": chunks,
            "loss_fn_inputs": st.dictionaries(
                st.sampled_from(["target_tokens", "weights", "logprobs"]), tensor, max_size=3
            ),
        }
    )
    batch = st.fixed_dictionaries(
        {"data": st.lists(datum, max_size=3), "loss_fn": st.sampled_from(known) | LEAVES}
    )
    messages = st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "x"]), "content": st.text(max_size=5)}
        ),
        max_size=2,
    )
    return st.one_of(
        st.sampled_from(known),
        ANYTHING,
        tensor,
        chunks,
        batch,
        messages,
        st.integers(0, 5),
        st.just("a"),
    )


@st.composite
def json_bodies(draw: st.DrawFn, route: APIRoute, known: list[str]) -> Any:
    if draw(st.integers(0, 9)) == 0:
        return draw(ANYTHING)
    model = body_of(route)
    names = (
        sorted(model.model_fields)
        if model
        else ["model_id", "seq_id", "forward_backward_input", "forward_input"]
    )
    required = [name for name in names if model is None or model.model_fields[name].is_required()]
    chosen = {*required, *draw(st.lists(st.sampled_from(names), max_size=4))} if names else set()
    return {name: draw(values(known)) for name in sorted(chosen)}


def path_with(draw: st.DrawFn, path: str, known: list[str]) -> str:
    while "{" in path:
        start, end = path.index("{"), path.index("}")
        text = draw(
            st.one_of(
                st.sampled_from(known),
                st.text(max_size=12),
                st.sampled_from(["..", "../..", "a/b", "%00", "x" * 300]),
            )
        )
        path = path[:start] + quote(text, safe="/") + path[end + 1 :]
    return path


@pytest.mark.parametrize(
    ("method", "path", "route"), ROUTES, ids=[f"{m} {p}" for m, p, _ in ROUTES]
)
def test_json_of_any_shape_gets_no_server_error(
    method: str, path: str, route: APIRoute, world: World
):
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        where = data.draw(st.composite(path_with)(path, world.known))
        content = (
            json.dumps(data.draw(json_bodies(route, world.known))) if method != "GET" else None
        )
        answer = world.request(
            method,
            f"http://localhost{where}",
            content=content,
            headers={"content-type": "application/json"},
        )
        event(f"{answer.status_code // 100}xx")
        assert answer.status_code < 500, (
            f"{method} {where} {content}: {answer.status_code} {answer.text}"
        )
        if answer.status_code >= 400:
            reply = answer.json()
            assert reply.get("detail") or reply.get("error") or reply.get("type") == "try_again", (
                reply
            )

    check()
    assert world.request("GET", "/healthz").status_code == 200


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.binary(max_size=300),
    st.sampled_from(
        [
            "application/json",
            "application/x-protobuf",
            "text/plain",
            "",
            "multipart/form-data; boundary=x",
        ]
    ),
    st.sampled_from(["", "zstd", "gzip", "identity"]),
    st.booleans(),
)
def test_bytes_of_any_kind_get_no_server_error(
    world: World, content: bytes, kind: str, encoding: str, compressed: bool
):
    content = zstandard.compress(content) if compressed else content
    headers = {
        name: value
        for name, value in (("content-type", kind), ("content-encoding", encoding))
        if value
    }
    for path in ("/forward_backward", "/forward", "/asample", "/create_session"):
        answer = world.request("POST", path, content=content, headers=headers)
        assert answer.status_code < 500 and answer.json(), f"{path} {headers}: {answer.text}"


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_protobuf_of_any_content_gets_no_server_error(world: World, data: st.DataObject):
    """Well-formed messages with fields of any content, for an existing model."""
    numbers = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4)
    message = schema.ForwardBackwardRequest(
        model_id=world.known[1],
        loss_fn=data.draw(st.sampled_from(["cross_entropy", "ppo", "gspo", ""])),
    )
    for _ in range(data.draw(st.integers(0, 2))):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = b"".join(
            n.to_bytes(4, "little", signed=True) for n in data.draw(numbers)
        )
        for name in data.draw(
            st.sets(st.sampled_from(["target_tokens", "weights", "logprobs", "advantages"]))
        ):
            tensor = datum.loss_fn_inputs[name]
            tensor.dtype = data.draw(st.integers(0, 5))
            tensor.shape.extend(
                data.draw(
                    st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 4), max_size=3)
                )
            )
            if data.draw(st.booleans()):
                tensor.dense = data.draw(st.binary(max_size=32))
            else:
                tensor.sparse_csr.values = data.draw(st.binary(max_size=32))
                tensor.sparse_csr.crow_indices = data.draw(st.binary(max_size=32))
                tensor.sparse_csr.col_indices = data.draw(st.binary(max_size=32))
    headers = {"content-type": "application/x-protobuf"}
    answer = world.request(
        "POST", "/forward_backward", content=message.SerializeToString(), headers=headers
    )
    assert answer.status_code < 500 and answer.json(), answer.text
    if answer.status_code == 200:
        result = world.request(
            "POST", "/retrieve_future", json={"request_id": answer.json()["request_id"]}
        )
        assert result.json().get("category") != "server", result.text


def test_truncated_and_oversized_bodies_get_no_server_error(world: World):
    async def endless() -> Any:
        while True:
            yield b"[" * 2**16

    answer = world.request("POST", "/create_session", content=endless())
    assert answer.status_code == 413 and "at most" in answer.text
    bomb = zstandard.compress(b"\0" * 10**8)
    headers = {"content-type": "application/x-protobuf", "content-encoding": "zstd"}
    assert (
        world.request("POST", "/forward_backward", content=bomb, headers=headers).status_code == 413
    )
    deep = "[" * 100_000
    for path in ("/create_session", "/forward_backward"):
        assert 400 <= world.request("POST", path, content=deep).status_code < 500
