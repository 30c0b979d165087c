"""The data of the console, with the application in-process."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from skyrl_actors.api import routes_console, routes_logs
from skyrl_actors.config.cluster import HttpConfig
from skyrl_actors.config.keys import digest_of
from skyrl_actors.controller import recent
from skyrl_actors.messages.keys import StoredKey
from tests.api.local import MODEL, AnsweringBackend, FolderLogs, config_for, edge, posted, resolved
from tests.api.test_stored_keys import holder, keys_of

ANN, BOB, ROOT = "tml-ann-12345", "tml-bob-12345", "tml-root-1234"


class Phased(AnsweringBackend):
    async def status(self) -> dict[str, Any]:
        timeline = [
            {"at": 10.0, "phase": "TRAIN", "seconds": 0.5, "moves": []},
            {"at": 14.0, "phase": "SAMPLE", "seconds": 2.0, "moves": []},
        ]
        return {"phase": "SAMPLE", "phase_timeline": timeline}


async def test_each_phase_has_its_end_and_the_last_one_lasts_until_now(tmp_path: Path):
    async with edge(config_for(tmp_path), Phased(str(tmp_path))) as http:
        state = (await http.get("http://localhost/console/state")).json()
        phases = state["phase_timeline"]
        assert [(one["phase"], one["at"], one["ended"]) for one in phases] == [
            ("TRAIN", 10.0, 14.0),
            ("SAMPLE", 14.0, state["at"]),
        ]


async def test_a_service_without_phases_has_an_empty_timeline(tmp_path: Path):
    async with edge(config_for(tmp_path)) as http:
        assert (await http.get("http://localhost/console/state")).json()["phase_timeline"] == []


PAGE = "http://localhost/console"


async def test_admins_act_and_others_see_only_their_own(tmp_path: Path):
    http = HttpConfig(api_keys=(f"ann={ANN}", f"bob={BOB}"))
    async with edge(config_for(tmp_path, http=http)) as anyone:
        admin = StoredKey(digest=digest_of(ROOT), name="ops", role="admin", created_at=1.0)
        await keys_of(anyone).add_key(admin, "eve")
        ann, bob, root = (holder(anyone, key) for key in (ANN, BOB, ROOT))
        session = (await posted(ann, "/create_session"))["session_id"]
        seen = {
            name: (await http.get(f"{PAGE}/operating")).json()
            for name, http in (("ann", ann), ("bob", bob), ("root", root), ("none", anyone))
        }
        assert [one["session_id"] for one in seen["root"]["sessions"]] == [session]
        assert seen["root"]["sessions"][0]["tenant"] == "ann" and seen["root"]["may_act"]
        assert seen["ann"]["sessions"] == seen["root"]["sessions"] and seen["bob"]["sessions"] == []
        assert "sessions" not in seen["none"] and not seen["ann"]["may_act"]
        act = {"act": "end", "of": session}
        for other in (ann, bob, anyone):
            assert (await other.post(f"{PAGE}/acts", json=act)).status_code == 403
            # Refused before the body is read.
            assert (await other.post(f"{PAGE}/acts", content=b"{")).status_code == 403
        assert (await root.post(f"{PAGE}/acts", json={"act": "explode"})).status_code == 422
        assert (await root.post(f"{PAGE}/acts", json=act)).status_code == 200
        assert (await root.get(f"{PAGE}/operating")).json()["sessions"] == []
        assert (await root.post(f"{PAGE}/acts", json=act)).status_code == 404
        (entry,) = [one for one in await keys_of(anyone).audit(9) if one.act == "end"]
        assert entry.actor == "key of ops, in the console"


async def test_failures_are_listed_for_their_tenant(tmp_path: Path):
    http = HttpConfig(api_keys=(f"ann={ANN}", f"bob={BOB}"))
    async with edge(config_for(tmp_path, http=http)) as anyone:
        ann, bob = holder(anyone, ANN), holder(anyone, BOB)
        session = (await posted(ann, "/create_session"))["session_id"]
        await resolved(ann, "/create_model", session_id=session, model_seq_id=0, base_model=MODEL)
        model_id = f"{session}:train:0"
        for number in (1, 2):  # the name is taken by the first
            body = {"model_id": model_id, "path": "one", "seq_id": number}
            request_id = (await posted(ann, "/save_weights", **body))["request_id"]
            await ann.post("/retrieve_future", json={"request_id": request_id})
        (failed,) = (await ann.get(f"{PAGE}/operating")).json()["failures"]
        assert failed["tenant"] == "ann" and failed["category"] == "user"
        assert failed["kind"] == "SaveWeights" and "exists already" in failed["message"]
        assert (await bob.get(f"{PAGE}/operating")).json()["failures"] == []


async def test_the_history_has_a_point_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recent, "EVERY_S", 0.01)
    monkeypatch.setattr(routes_console, "SLOW_S", 0.0)
    async with edge(config_for(tmp_path)) as http:
        await asyncio.sleep(0.1)
        points = (await http.get(f"{PAGE}/operating")).json()["history"]
        assert len(points) > 2 and points[-1]["at"] > points[0]["at"]
        assert points[-1].keys() >= {"trained_tokens", "sampled_tokens", "failed", "open_requests"}


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_pages_of_other_sites_cannot_act(site: str, tmp_path: Path):
    """A page in the browser of somebody on this machine reaches the loopback address."""
    async with edge(config_for(tmp_path)) as http:
        sent = {"Sec-Fetch-Site": site}
        for path in (f"{PAGE}/acts", "/create_session"):
            body = {"act": "pause"} if path.endswith("acts") else {"tags": [], "sdk_version": "1"}
            assert (await http.post(path, json=body, headers=sent)).status_code == 403
        assert (await http.get(f"{PAGE}/state", headers=sent)).status_code == 200
        own = {"Sec-Fetch-Site": "same-origin"}
        answer = await http.post(f"{PAGE}/acts", json={"act": "pause"}, headers=own)
        assert answer.status_code == 200


async def test_a_checkpoint_can_be_downloaded_by_its_owner(tmp_path: Path):
    http = HttpConfig(api_keys=(f"ann={ANN}", f"bob={BOB}"))
    async with edge(config_for(tmp_path, http=http)) as anyone:
        admin = StoredKey(digest=digest_of(ROOT), name="ops", role="admin", created_at=1.0)
        await keys_of(anyone).add_key(admin, "eve")
        ann, bob, root = (holder(anyone, key) for key in (ANN, BOB, ROOT))
        session = (await posted(ann, "/create_session"))["session_id"]
        await resolved(ann, "/create_model", session_id=session, model_seq_id=0, base_model=MODEL)
        model_id = f"{session}:train:0"
        await resolved(ann, "/save_weights", model_id=model_id, path="one", seq_id=1)
        named = {"path": f"tinker://{model_id}/weights/one"}
        local = {"Host": "localhost:8000"}
        link = await ann.get(f"{PAGE}/link", params=named, headers=local)
        assert link.status_code == 200 and "signature=" in link.json()["url"]
        path = link.json()["url"].split("localhost:8000")[1]
        archive = await anyone.get(f"http://localhost{path}")
        assert archive.status_code == 200 and archive.content
        assert (await bob.get(f"{PAGE}/link", params=named)).status_code == 404
        assert (await anyone.get(f"{PAGE}/link", params=named)).status_code == 404
        assert "read" not in [one.act for one in await keys_of(anyone).audit(9)]
        assert (await root.get(f"{PAGE}/link", params=named, headers=local)).status_code == 200
        (noted,) = [one for one in await keys_of(anyone).audit(9) if one.act == "read"]
        assert "ops" in noted.actor and named["path"] in str(noted)
        named["path"] += "2"
        for key in (ann, root):
            assert (await key.get(f"{PAGE}/link", params=named)).status_code == 404


@pytest.mark.parametrize(
    ("origin", "status"), [("http://evil.example", 403), ("http://localhost", 200), ("null", 403)]
)
async def test_a_browser_over_plain_http_names_only_the_origin(
    origin: str, status: int, tmp_path: Path
):
    async with edge(config_for(tmp_path)) as http:
        sent = {"Origin": origin}
        answer = await http.post(f"{PAGE}/acts", json={"act": "resume"}, headers=sent)
        assert answer.status_code == status


async def test_admins_read_the_newest_lines_of_logs_and_others_none(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    lines = [f"line {n}\n" for n in range(1000)]
    (tmp_path / "logs" / "engine:0").write_text("".join(lines))
    http = HttpConfig(api_keys=(f"ann={ANN}",))
    async with edge(config_for(tmp_path, http=http)) as anyone:
        admin = StoredKey(digest=digest_of(ROOT), name="ops", role="admin", created_at=1.0)
        await keys_of(anyone).add_key(admin, "eve")
        ann, root = holder(anyone, ANN), holder(anyone, ROOT)
        assert (await root.get(f"{PAGE}/logs")).json() == ["engine:0"]
        text = (await root.get(f"{PAGE}/logs/engine:0")).json()["text"]
        assert text == "".join(lines[-routes_logs.LINES :])
        assert (await root.get(f"{PAGE}/logs/passwords")).status_code == 404
        for other in (ann, anyone):
            assert (await other.get(f"{PAGE}/logs")).json() == []
            assert (await other.get(f"{PAGE}/logs/engine:0")).status_code == 403


async def test_logs_that_cannot_be_read_hold_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "engine:0").write_text("a line")
    ended = threading.Event()
    monkeypatch.setattr(routes_logs, "PATIENCE_S", 0.05)
    monkeypatch.setattr(FolderLogs, "newest", lambda *_: ended.wait(10))
    try:
        async with edge(config_for(tmp_path)) as http:
            slow = await http.get(f"{PAGE}/logs/engine:0")
            assert slow.status_code == 503 and "does not answer" in slow.text
            for number in range(20):
                assert (await http.get(f"{PAGE}/logs/odd{number}")).status_code == 404
            locks = http._transport.app.state.answer_cache._locks  # type: ignore[attr-defined]
            assert set(locks) == {"parts", "log of engine:0"}
    finally:
        ended.set()


@pytest.mark.parametrize("host", ["evil.example:8000", "evil.example", "127.0.0.1.nip.io", "["])
async def test_a_name_that_leads_to_this_machine_is_refused_without_keys(host: str, tmp_path: Path):
    """A page of that name could act and read (DNS rebinding): to a browser it is the same site."""
    own = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
    async with edge(config_for(tmp_path)) as http:
        root = str(http.base_url).removesuffix("/api/v1/")
        for method, path in (
            ("GET", "/console/state"),
            ("GET", "/console/logs/controller"),
            ("POST", "/console/acts"),
            ("GET", "/api/v1/training_runs"),
            ("POST", "/api/v1/create_session"),
        ):
            answer = await http.request(method, f"{root}{path}", headers=own, json={"act": "drain"})
            assert answer.status_code == 403 and "http.public_url" in answer.text, path
        assert (await http.get(f"{root}/healthz", headers=own)).status_code == 200


@pytest.mark.parametrize(
    ("host", "options"),
    [
        ("127.0.0.1:8000", {}),
        ("[::1]:8000", {}),
        ("localhost:18000", {}),  # a tunnel
        ("10.0.0.7", {}),
        ("rl.example.com", {"public_url": "https://rl.example.com/tinker"}),
        ("node-7:8000", {"host": "0.0.0.0", "open_to_network": True}),
        ("rl.example.com", {"api_keys": [f"ann={ANN}"]}),
    ],
)
async def test_addresses_and_known_names_are_served(
    host: str, options: dict[str, Any], tmp_path: Path
):
    config = HttpConfig.model_validate(options)
    async with edge(config_for(tmp_path, http=config)) as http:
        given = {"Host": host, "X-API-Key": ANN}
        assert (await http.get("/training_runs", headers=given)).status_code == 200
