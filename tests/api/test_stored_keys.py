"""API keys of the journal at the HTTP edge: they work and end while the service runs."""

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from skyrl_actors.api import credentials
from skyrl_actors.api.credentials import Credentials, Grant
from skyrl_actors.config.cluster import HttpConfig
from skyrl_actors.config.keys import digest_of, hashed, owner_of_name
from skyrl_actors.messages.errors import Unavailable
from skyrl_actors.messages.keys import KeyTable, Role, StoredKey
from tests.api.local import MODEL, config_for, edge, posted, resolved

ANN, BOB, ROOT, READER = "tml-ann-12345", "tml-bob-12345", "tml-root-1234", "tml-reader-12"


def stored(secret: str, name: str, role: Role = "tenant", **more: float) -> StoredKey:
    return StoredKey(digest=digest_of(secret), name=name, role=role, created_at=1.0, **more)


def keys_of(http: httpx.AsyncClient) -> Any:
    app: Any = http._transport
    return app.app.state.api.client.calls


def holder(http: httpx.AsyncClient, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=http._transport, base_url=http.base_url, headers={"X-API-Key": key}
    )


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "FRESH_S", 0.05)
    monkeypatch.setattr(credentials.Credentials.refresh, "__defaults__", (0.05,))
    monkeypatch.setattr(credentials, "UNKNOWN_FRESH_S", 0.0)


async def status(http: httpx.AsyncClient) -> int:
    return (await http.get("/get_server_capabilities")).status_code


async def test_the_first_key_closes_an_open_service_and_its_end_does_not_open_it(tmp_path: Path):
    async with edge(config_for(tmp_path)) as anyone:
        calls, ann = keys_of(anyone), holder(anyone, ANN)
        assert await status(anyone) == 200
        await calls.add_key(stored(ANN, "ann"), "eve")
        assert await status(ann) == 200
        await asyncio.sleep(0.06)
        assert await status(anyone) == 401
        await calls.revoke_key("ann", "eve", 2.0)
        await asyncio.sleep(0.06)
        assert await status(ann) == 401 and await status(anyone) == 401


async def test_a_key_ends_at_its_time(tmp_path: Path):
    async with edge(config_for(tmp_path, http=HttpConfig(api_keys=(f"bob={BOB}",)))) as anyone:
        ann = holder(anyone, ANN)
        until = time.time() + 0.5
        await keys_of(anyone).add_key(stored(ANN, "ann", expires_at=until), "eve")
        assert await status(ann) == 200 and await status(holder(anyone, BOB)) == 200
        await asyncio.sleep(0.6)
        assert await status(ann) == 401 and await status(holder(anyone, BOB)) == 200


async def test_a_rotated_key_keeps_the_models_of_its_name(tmp_path: Path):
    async with edge(config_for(tmp_path, http=HttpConfig(api_keys=(f"ann={ANN}",)))) as anyone:
        old, new = holder(anyone, ANN), holder(anyone, "tml-new-1234")
        session = (await posted(old, "/create_session"))["session_id"]
        await resolved(old, "/create_model", session_id=session, model_seq_id=0, base_model=MODEL)
        await keys_of(anyone).rotate_key(stored("tml-new-1234", "ann"), 0.0, "eve")
        await asyncio.sleep(0.06)
        assert await status(old) == 401
        found = await new.post("/get_info", json={"model_id": f"{session}:train:0"})
        assert found.status_code == 200


async def test_a_reader_sees_what_the_name_owns_and_changes_nothing(tmp_path: Path):
    async with edge(config_for(tmp_path, http=HttpConfig(api_keys=(f"ann={ANN}",)))) as anyone:
        ann, reader = holder(anyone, ANN), holder(anyone, READER)
        await keys_of(anyone).add_key(stored(READER, "ann", "read_only"), "eve")
        session = (await posted(ann, "/create_session"))["session_id"]
        await resolved(ann, "/create_model", session_id=session, model_seq_id=0, base_model=MODEL)
        model_id = f"{session}:train:0"
        assert (await reader.post("/get_info", json={"model_id": model_id})).status_code == 200
        assert (await reader.get(f"/training_runs/{model_id}")).status_code == 200
        refused = [
            await reader.post("/optim_step", json={"model_id": model_id, "seq_id": 1}),
            await reader.post("/unload_model", json={"model_id": model_id}),
            await reader.post(f"/sessions/{session}/finish", json={}),
            await reader.delete(f"/training_runs/{model_id}/checkpoints/weights/one"),
            await reader.put(f"/training_runs/{model_id}/checkpoints/weights/one/ttl", json={}),
            await reader.post("/asample", json={}),
        ]
        assert [one.status_code for one in refused] == [403] * len(refused)
        assert "this API key is read-only: POST /api/v1/optim_step" in refused[0].text


async def test_an_admin_sees_and_uses_the_objects_of_all(tmp_path: Path):
    async with edge(config_for(tmp_path, http=HttpConfig(api_keys=(f"ann={ANN}", BOB)))) as anyone:
        ann, bob, root = (holder(anyone, key) for key in (ANN, BOB, ROOT))
        await keys_of(anyone).add_key(stored(ROOT, "ops", "admin"), "eve")
        session = (await posted(ann, "/create_session"))["session_id"]
        await resolved(ann, "/create_model", session_id=session, model_seq_id=0, base_model=MODEL)
        path = f"/training_runs/{session}:train:0"
        assert [(await http.get(path)).status_code for http in (ann, bob, root)] == [200, 404, 200]
        sessions = (await root.get("/sessions")).json()["sessions"]
        assert session in str(sessions)
        page = f"{anyone.base_url}".replace("/api/v1", "").rstrip("/") + "/console/state"
        assert len((await root.get(page)).json()["models"]) == 1
        assert (await bob.get(page)).json()["models"] == []
        assert (await root.post(f"/sessions/{session}/finish", json={})).status_code == 200


async def test_a_token_ends_with_the_key_and_the_role_that_it_was_made_for(tmp_path: Path):
    config = config_for(
        tmp_path, http=HttpConfig(api_keys=(f"bob={BOB}",), sdk={"pjwt_auth_enabled": True})
    )
    async with edge(config) as anyone:
        calls = keys_of(anyone)
        await calls.add_key(stored(READER, "ann", "read_only"), "eve")
        token = (await posted(holder(anyone, READER), "/auth/token"))["jwt"]
        bearer = holder(anyone, token)
        assert await status(bearer) == 200
        assert (await bearer.post("/asample", json={})).status_code == 403
        await calls.add_key(stored(ANN, "ann"), "eve")  # of the same owner, in another role
        await calls.revoke_key(stored(READER, "ann").key_id, "eve", 2.0)
        await asyncio.sleep(0.06)
        assert await status(bearer) == 401 and await status(holder(anyone, ANN)) == 200


class Controller:
    """Answers with a table, or not at all."""

    def __init__(self, *keys: StoredKey):
        self.table = KeyTable(version="1", keys=keys)
        self.asked = 0
        self.down = False

    async def fetch(self, version: str) -> KeyTable | None:
        self.asked += 1
        if self.down:
            raise Unavailable("the controller is restarting")
        return None if version == self.table.version else self.table


async def test_the_last_table_holds_while_the_controller_is_away():
    controller = Controller(stored(ANN, "ann"))
    found = Credentials([hashed(f"bob={BOB}")], controller.fetch)
    ann = Grant(owner_of_name("ann", ""), key_id=stored(ANN, "ann").key_id)
    assert await found.grant(ANN) == ann
    controller.down = True
    await asyncio.sleep(0.06)
    assert await found.grant(ANN) == ann and await found.grant("tml-unknown") is None


async def test_no_key_is_accepted_before_a_table_was_seen():
    controller = Controller()
    controller.down = True
    found = Credentials([hashed(f"bob={BOB}")], controller.fetch)
    with pytest.raises(Unavailable):  # bob's key may have been revoked
        await found.grant(BOB)
    assert found.hide_faults


async def test_requests_share_one_question_and_an_idle_service_asks_nothing():
    controller = Controller(stored(ANN, "ann"))
    found = Credentials([], controller.fetch)
    await asyncio.gather(*(found.grant(ANN) for _ in range(50)))
    assert controller.asked == 1
    await asyncio.sleep(0.2)
    assert controller.asked == 1


async def test_a_token_ends_with_its_key_though_its_owner_has_another(tmp_path: Path):
    config = config_for(
        tmp_path, http=HttpConfig(api_keys=(f"bob={BOB}",), sdk={"pjwt_auth_enabled": True})
    )
    async with edge(config) as anyone:
        calls = keys_of(anyone)
        await calls.add_key(stored(ANN, "ann"), "eve")
        token = (await posted(holder(anyone, ANN), "/auth/token"))["jwt"]
        token = (await posted(holder(anyone, token), "/auth/token"))["jwt"]  # renewed
        await calls.add_key(stored("tml-new-1234", "ann"), "eve")
        assert await status(holder(anyone, token)) == 200
        await calls.revoke_key(stored(ANN, "ann").key_id, "eve", 2.0)
        await asyncio.sleep(0.06)
        bearer = holder(anyone, token)
        assert await status(bearer) == 401 and (await bearer.post("/auth/token")).status_code == 401
        assert await status(holder(anyone, "tml-new-1234")) == 200


async def test_a_read_only_key_takes_no_session_and_keeps_none_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("skyrl_actors.controller.session_start.SESSIONS_PER_KEY", 1)
    async with edge(config_for(tmp_path, http=HttpConfig(api_keys=(f"ann={ANN}",)))) as anyone:
        ann, reader = holder(anyone, ANN), holder(anyone, READER)
        await keys_of(anyone).add_key(stored(READER, "ann", "read_only"), "eve")
        for _ in range(3):
            own = (await posted(reader, "/create_session"))["session_id"]
            await posted(reader, "/session_heartbeat", session_id=own)
        session = (await posted(ann, "/create_session"))["session_id"]
        assert (await ann.get("/sessions")).json()["sessions"] == [session]
        await posted(ann, f"/sessions/{session}/finish")
        await posted(reader, "/session_heartbeat", session_id=session)
        gone = await ann.post("/session_heartbeat", json={"session_id": session})
        assert gone.status_code == 410
