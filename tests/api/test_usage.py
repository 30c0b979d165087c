"""Usage, quotas and the audit log at the HTTP edge, in the types of the SDK."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from tinker import types

from skyrl_actors.api.error_bodies import error_answer
from skyrl_actors.config.cluster import HttpConfig, LimitsConfig
from skyrl_actors.config.keys import digest_of, owner_of_name
from skyrl_actors.messages.keys import StoredKey
from skyrl_actors.messages.usage import Quota
from skyrl_actors.storage.mirror import Mirror
from tests.api.local import MODEL, config_for, edge, posted, resolved
from tests.api.test_stored_keys import holder, keys_of

ANN, BOB, ROOT = "tml-ann-12345", "tml-bob-12345", "tml-root-1234"


@pytest.fixture
async def anyone(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    http = HttpConfig(api_keys=(f"ann={ANN}", f"bob={BOB}"))
    async with edge(config_for(tmp_path, http=http)) as made:
        admin = StoredKey(digest=digest_of(ROOT), name="ops", role="admin", created_at=1.0)
        await keys_of(made).add_key(admin, "eve")
        yield made


async def trained(http: httpx.AsyncClient, **labels: Any) -> tuple[str, str]:
    session = (await posted(http, "/create_session", **labels))["session_id"]
    await resolved(http, "/create_model", session_id=session, model_seq_id=0, base_model=MODEL)
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3, 4]}]},
        "loss_fn_inputs": {"target_tokens": {"data": [2, 3, 4, 5], "dtype": "int64"}},
    }
    model_id = f"{session}:train:0"
    body = {"data": [datum], "loss_fn": "cross_entropy"}
    await resolved(
        http, "/forward_backward", model_id=model_id, seq_id=1, forward_backward_input=body
    )
    await resolved(http, "/save_weights", model_id=model_id, path="one", seq_id=2)
    return session, model_id


async def sampled(http: httpx.AsyncClient, max_tokens: int = 3) -> dict[str, Any]:
    return await resolved(
        http,
        "/asample",
        base_model=MODEL,
        prompt={"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        sampling_params={"max_tokens": max_tokens},
        num_samples=1,
    )


def window() -> dict[str, str]:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    ends = hour + timedelta(hours=2)
    return {"starting_on": hour.isoformat(), "ending_before": ends.isoformat()}


async def usage(http: httpx.AsyncClient) -> types.BillingUsageResponse:
    answer = await http.get("/billing/usage/events", params=window())
    assert answer.status_code == 200, answer.text
    return types.BillingUsageResponse.model_validate(answer.json())


async def test_a_key_sees_its_usage_and_an_admin_that_of_all(anyone: httpx.AsyncClient):
    ann, bob, root = (holder(anyone, key) for key in (ANN, BOB, ROOT))
    session, _ = await trained(ann, user_metadata={"run": "7"})
    await sampled(bob)
    mine = await usage(ann)
    found = {
        event.event_info.type: getattr(event.event_info, "token_count", None)
        or getattr(event.event_info, "count", None)
        for event in mine.data
    }
    assert found == {"training": 4, "checkpoint": 1}
    assert {(event.session_id, event.user_name, event.base_model) for event in mine.data} == {
        (session, "ann", MODEL)
    }
    assert mine.sessions[session].user_metadata == {"run": "7"}
    kinds = {event.event_info.type for event in (await usage(bob)).data}
    assert kinds == {"sampling_prefill", "sampling_sample"}
    assert {event.user_name for event in (await usage(root)).data} == {"ann", "bob"}


@pytest.mark.parametrize(
    ("starting_on", "ending_before"),
    [
        ("2026-01-01T00:30:00Z", "2026-01-01T02:00:00Z"),
        ("2026-01-01T02:00:00Z", "2026-01-01T02:00:00Z"),
        ("2026-01-01T00:00:00Z", "2026-01-16T00:00:00Z"),
        ("yesterday", "2026-01-16T00:00:00Z"),
    ],
)
async def test_a_wrong_window_is_refused(
    starting_on: str, ending_before: str, anyone: httpx.AsyncClient
):
    params = {"starting_on": starting_on, "ending_before": ending_before}
    answer = await holder(anyone, ANN).get("/billing/usage/events", params=params)
    assert answer.status_code == 422


async def test_the_bytes_of_checkpoints_are_listed(anyone: httpx.AsyncClient):
    ann, bob, root = (holder(anyone, key) for key in (ANN, BOB, ROOT))
    await trained(ann)
    for http, count in ((ann, 1), (bob, 0), (root, 1)):
        answer = await http.get("/billing/usage/checkpoints/current")
        found = types.CurrentCheckpointStorageUsageResponse.model_validate(answer.json())
        assert sum(item.checkpoint_count for item in found.data) == count
        assert all(item.user_name == "ann" and item.size_bytes > 0 for item in found.data)


async def test_a_key_without_tokens_today_is_refused(anyone: httpx.AsyncClient):
    ann = holder(anyone, ANN)
    await keys_of(anyone).set_quota("ann", Quota(tokens_per_day=1), "eve")
    await sampled(ann)
    body = {
        "base_model": MODEL,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        "sampling_params": {"max_tokens": 3},
        "num_samples": 1,
    }
    refused = await ann.post("/asample", json=body)
    assert refused.status_code == 402 and "may use 1 (tokens_per_day)" in refused.text
    assert await sampled(holder(anyone, BOB))


def test_openai_clients_get_the_status_that_they_expect():
    answer = error_answer("/v1/completions", "no tokens left", "user", 402)
    error = json.loads(bytes(answer.body))["error"]
    assert (answer.status_code, error["code"]) == (429, "insufficient_quota")


async def test_admins_read_the_audit_log_and_who_read_published_checkpoints(
    anyone: httpx.AsyncClient,
):
    ann, bob, root = (holder(anyone, key) for key in (ANN, BOB, ROOT))
    _, model_id = await trained(ann)
    path = f"tinker://{model_id}/weights/one"
    checkpoint = f"/training_runs/{model_id}/checkpoints/weights/one"
    assert (await ann.post(f"{checkpoint}/publish")).status_code == 200
    for http in (ann, bob, bob):
        found = await http.post("/weights_info", json={"tinker_path": path})
        assert found.status_code == 200
    assert (await bob.get("/audit")).status_code == 403
    answer = await root.get("/audit", params={"event_type": "checkpoints"})
    log = types.AuditLogResponse.model_validate(answer.json())
    assert [
        (entry.event, entry.event_details["actor"], entry.tinker_path) for entry in log.entries
    ] == [
        ("checkpoint_publish", "key of ann", path),
        ("checkpoint_read", "key of bob", path),
    ]
    everything = (await root.get("/audit")).json()["entries"]
    assert everything[0]["event"] == "api_key_add"
    assert (await root.get("/audit", params={"day": "2020-01-01"})).json()["entries"] == []


async def test_the_status_names_tenants(anyone: httpx.AsyncClient):
    ann, root = holder(anyone, ANN), holder(anyone, ROOT)
    await trained(ann)
    await sampled(holder(anyone, BOB))
    page = "http://localhost/console/state"
    shown = (await root.get(page)).json()
    assert {"ann", "bob"} <= shown["tenants"].keys()
    assert [model["tenant"] for model in shown["models"]] == ["ann"]
    own = (await ann.get(page)).json()
    assert "ann" in own["tenants"] and "bob" not in own["tenants"]
    assert owner_of_name("ann", "") not in shown["tenants"]


async def test_a_copy_over_the_limit_is_refused_and_a_repeat_of_a_copy_is_not(
    anyone: httpx.AsyncClient,
):
    ann = holder(anyone, ANN)
    session, model_id = await trained(ann)
    body = {
        "source_path": f"tinker://{model_id}/weights/one",
        "session_id": session,
        "model_seq_id": 7,
    }
    first = await ann.post("/copy_weights", json=body)
    await keys_of(anyone).set_quota("ann", Quota(checkpoint_bytes=1), "eve")
    repeat = await ann.post("/copy_weights", json=body)
    assert (first.status_code, repeat.status_code) == (200, 200), first.text
    other = await ann.post("/copy_weights", json=body | {"model_seq_id": 8})
    assert other.status_code == 429 and "checkpoint_bytes" in other.text


async def test_copies_at_once_do_not_exceed_the_limit(anyone: httpx.AsyncClient):
    ann = holder(anyone, ANN)
    session, model_id = await trained(ann)
    body = {"source_path": f"tinker://{model_id}/weights/one", "session_id": session}
    (entry,) = (await ann.get("/checkpoints")).json()["checkpoints"]
    most = 7 * entry["size_bytes"] // 2  # the notes of a copy are longer
    await keys_of(anyone).set_quota("ann", Quota(checkpoint_bytes=most), "eve")
    copies = (
        ann.post("/copy_weights", json={**body, "model_seq_id": 10 + number}) for number in range(9)
    )
    answers = [answer.status_code for answer in await asyncio.gather(*copies)]
    assert sorted(answers) == [200] * 2 + [429] * 7
    assert len((await ann.get("/checkpoints")).json()["checkpoints"]) == 3


async def test_a_repeat_that_waits_for_its_copy_is_not_refused(anyone: httpx.AsyncClient):
    ann = holder(anyone, ANN)
    session, model_id = await trained(ann)
    (entry,) = (await ann.get("/checkpoints")).json()["checkpoints"]
    await keys_of(anyone).set_quota(
        "ann", Quota(checkpoint_bytes=2 * entry["size_bytes"] + 200), "eve"
    )
    body = {"source_path": f"tinker://{model_id}/weights/one", "session_id": session}
    copies = (ann.post("/copy_weights", json={**body, "model_seq_id": 10}) for _ in range(5))
    assert [one.status_code for one in await asyncio.gather(*copies)] == [200] * 5
    assert (await ann.post("/copy_weights", json={**body, "model_seq_id": 11})).status_code == 429


async def test_a_tenant_cannot_hide_acts_of_operators(
    anyone: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("skyrl_actors.api.routes_usage.MOST_ACTS", 3)
    ann, root = holder(anyone, ANN), holder(anyone, ROOT)
    _, model_id = await trained(ann)
    place = f"/training_runs/{model_id}/checkpoints/weights"
    for _ in range(3):
        assert (await ann.post(f"{place}/nothing/publish")).status_code == 404
        assert (await ann.post(f"{place}/one/publish")).status_code == 200
        assert (await ann.post(f"{place}/one/publish")).status_code == 200
        assert (await ann.delete(f"{place}/one/publish")).status_code == 200
    entries = (await root.get("/audit")).json()["entries"]
    events = [entry["event"] for entry in entries]
    assert events == ["api_key_add"] + [
        "checkpoint_" + act for act in ("unpublish", "publish", "unpublish")
    ]


async def test_an_unpublish_that_failed_is_completed_by_its_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    mirror = tmp_path / "mirror"
    async with edge(config_for(tmp_path, checkpoint_mirror=f"file://{mirror}")) as http:
        _, model_id = await trained(http)
        place = f"/training_runs/{model_id}/checkpoints/weights/one/publish"
        assert (await http.post(place)).status_code == 200
        with monkeypatch.context() as broken:
            broken.setattr(Mirror, "put_file", _no_route)
            assert (await http.delete(place)).status_code >= 500
        assert (await http.delete(place)).status_code == 200
    (about,) = mirror.rglob("about.json")
    assert json.loads(about.read_text())["public"] is False


def _no_route(*_: Any) -> None:
    raise OSError("no route")


async def test_a_day_beyond_all_calendars_is_refused(anyone: httpx.AsyncClient):
    answer = await holder(anyone, ROOT).get("/audit", params={"day": "9999-12-31"})
    assert answer.status_code == 422


async def test_nothing_new_is_accepted_on_a_full_disk(tmp_path: Path):
    full = LimitsConfig(full_free_bytes=2**62)
    async with edge(config_for(tmp_path, limits=full)) as anyone:
        async with asyncio.timeout(5):
            while (await anyone.get("/healthz")).status_code != 503:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        session = {"tags": [], "sdk_version": "1"}
        assert (await anyone.post("/create_session", json=session)).status_code == 503


async def test_a_drained_service_copies_no_checkpoint(anyone: httpx.AsyncClient):
    ann = holder(anyone, ANN)
    session, model_id = await trained(ann)
    await keys_of(anyone).set_mode("draining", "eve")
    source = f"tinker://{model_id}/weights/one"
    body = {"source_path": source, "session_id": session, "model_seq_id": 7}
    assert (await ann.post("/copy_weights", json=body)).status_code == 503
    await keys_of(anyone).set_mode("running", "eve")
    assert (await ann.post("/copy_weights", json=body)).status_code == 200


async def test_acts_of_an_admin_on_what_others_own_are_recorded(anyone: httpx.AsyncClient):
    ann, root = holder(anyone, ANN), holder(anyone, ROOT)
    session, model = await trained(ann)
    path = f"/training_runs/{model}/checkpoints/weights/one"
    for who in (root, ann):  # a tenant's acts on its own are not the operators'
        assert (await who.get(f"{path}/archive")).status_code == 302
        assert (await who.put(f"{path}/ttl", json={"ttl_seconds": 600})).status_code == 200
    assert (await root.delete(path)).status_code == 200
    assert (await root.delete(path)).status_code == 404  # not recorded: it is gone
    assert (await root.post("/unload_model", json={"model_id": model})).status_code == 200
    assert (await root.post(f"/sessions/{session}/finish", json={})).status_code == 200
    acts = await keys_of(anyone).audit(20)
    shown = [entry["event"] for entry in (await root.get("/audit")).json()["entries"]]
    assert shown[-2:] == ["model_unload", "session_end"] and "checkpoint_delete" in shown
    checkpoint = f"tinker://{model}/weights/one"
    assert [(act.act, act.subject) for act in acts if act.actor == "key of ops"] == [
        ("read", checkpoint),
        ("expire", checkpoint),
        ("delete", checkpoint),
        ("unload", model),
        ("end", session),
    ]
    assert not [act for act in acts if "ann" in act.actor]
