"""A service with two controllers at the HTTP edge, both in this process."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer, models

from skyrl_actors.api import sharded_client, shared_settings, silent_shards
from skyrl_actors.api.app import build_app
from skyrl_actors.api.shard_rules import RULES
from skyrl_actors.api.sharded_client import ShardedClient
from skyrl_actors.api.state import ApiState
from skyrl_actors.commands.operate import still_open
from skyrl_actors.config.cluster import ClusterConfig, HttpConfig
from skyrl_actors.config.shard_configs import shard_configs
from skyrl_actors.config.shards import ShardsConfig
from skyrl_actors.controller.calls import ControllerCalls
from skyrl_actors.controller.checkpoints import folders_of
from skyrl_actors.controller.controller import Controller
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.messages.errors import InternalError, InvalidRequest, Unavailable
from skyrl_actors.messages.paths import owner_of, parse_path, shard_of
from skyrl_actors.messages.usage import Quota
from skyrl_actors.remote import ActorDied
from skyrl_actors.transport.protocols import methods_of
from tests.api.local import (
    MODEL,
    AnsweringBackend,
    LocalClient,
    config_for,
    logs_of,
    posted,
    resolved,
)
from tests.api.test_stored_keys import holder, keys_of, stored

ANN, BOB = "tml-ann-12345", "tml-bob-12345"
TWO = ShardsConfig(count=2)
DATUM = {
    "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]},
        "weights": {"data": [1.0, 1.0, 1.0], "dtype": "float32", "shape": [3]},
    },
}


class Shard(LocalClient):
    """A shard that can be `dead`, `stopped`, `starting` or `broken`."""

    state = "alive"

    async def _ask(
        self, method: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        if self.state == "dead":
            raise ActorDied("it was killed")
        if self.state == "broken":
            raise InternalError("no file can be opened")
        if self.state == "starting" and method is ControllerCalls.fault:
            return "the service is still starting"
        if self.state in ("stopped", "starting"):
            await asyncio.Event().wait()
        return await super()._ask(method, arguments, named)


@dataclass
class Service:
    http: httpx.AsyncClient
    shards: list[Shard]
    controllers: list[Controller]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (sharded_client, "NEXT_S", 1.0),
        (sharded_client, "SILENT_S", 0.5),
        (silent_shards, "ASK_S", 0.2),
        (silent_shards, "ANSWER_S", 1.0),
        (silent_shards, "FAULTY_S", 0.5),
        (shared_settings, "EVERY_S", 0.2),
    ):
        monkeypatch.setattr(module, name, value)


@asynccontextmanager
async def service(config: ClusterConfig) -> AsyncIterator[Service]:
    controllers = [
        Controller(
            own,
            AnsweringBackend(str(config.checkpoint_dir)),
            SqlJournal(own.journal, KINDS),
        )
        for own in shard_configs(config)
    ]
    for controller in controllers:
        await controller.start()
    shards = [Shard(controller) for controller in controllers]
    for shard in shards:
        shard.patience_s = 0.5
    has_keys = bool(config.http.api_keys)
    client = ShardedClient(shards, config.shards.spread, shares=True, has_keys=has_keys)
    client.patience_s = 0.5
    app = build_app(ApiState(config, client, logs_of(config)))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    base_url = "http://localhost/api/v1"
    async with httpx.AsyncClient(transport=transport, base_url=base_url, timeout=60) as http:
        yield Service(http, shards, controllers)
    await client.close()
    for controller in controllers:
        await controller.close()


async def session_on(service: Service, number: int, http: httpx.AsyncClient | None = None) -> str:
    for _ in range(4):
        session: str = (await posted(http or service.http, "/create_session"))["session_id"]
        if shard_of(session) == number:
            return session
    raise AssertionError(f"no session on shard {number}")


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not reached():  # noqa: ASYNC110  the service does it in the background
            await asyncio.sleep(0.02)


async def model_on(service: Service, number: int) -> str:
    session = await session_on(service, number)
    await resolved(
        service.http, "/create_model", session_id=session, model_seq_id=0, base_model=MODEL
    )
    return f"{session}:train:0"


def batch(model_id: str, seq: int) -> dict[str, Any]:
    inputs = {"data": [DATUM], "loss_fn": "cross_entropy"}
    return {"model_id": model_id, "seq_id": seq, "forward_backward_input": inputs}


# where calls go


def test_every_call_of_the_controller_has_a_rule():
    assert methods_of(ControllerCalls) == RULES.keys()


async def test_sessions_take_turns_and_their_requests_follow_them(tmp_path: Path):
    async with service(config_for(tmp_path, shards=TWO)) as made:
        for number, controller in enumerate(made.controllers, 1):
            model_id = await model_on(made, number)
            assert list(controller.tenants.models) == [model_id]
            accepted = await posted(made.http, "/forward_backward", **batch(model_id, 1))
            assert shard_of(accepted["request_id"]) == shard_of(model_id) == number
            saved = await resolved(
                made.http, "/save_weights_for_sampler", model_id=model_id, seq_id=2, path="a"
            )
            assert shard_of(parse_path(saved["path"]).model_id) == number


async def test_a_checkpoint_of_one_shard_is_loaded_on_another(tmp_path: Path):
    async with service(config_for(tmp_path, shards=TWO)) as made:
        here, there = [await model_on(made, number) for number in (1, 2)]
        saved = await resolved(made.http, "/save_weights", model_id=here, seq_id=1, path="a")
        await resolved(made.http, "/load_weights", model_id=there, seq_id=1, path=saved["path"])
        made.shards[0].state = "dead"  # checkpoints are files, which any shard reads
        found = await made.http.post("/weights_info", json={"tinker_path": saved["path"]})
        assert found.status_code == 200


async def test_a_past_step_of_another_shard_is_refused_with_the_way_out(tmp_path: Path):
    async with service(config_for(tmp_path, shards=TWO)) as made:
        here = await model_on(made, 1)
        session = await session_on(made, 2)
        path = f"tinker://{here}/steps/0"
        asked = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": False}
        refused = await made.http.post("/load_weights", json=asked)
        assert refused.status_code == 422 and "on shard 1" in refused.text


async def test_requests_of_the_openai_route_go_to_all_shards(tmp_path: Path):
    config = config_for(tmp_path, shards=TWO)
    config.checkpoint_dir.mkdir()
    Tokenizer(models.WordLevel({f"t{token}": token for token in range(320)}, "t0")).save(
        str(config.checkpoint_dir / "tokenizer.json")
    )
    async with service(config) as made:
        asked = {"model": MODEL, "prompt": [1, 2], "max_tokens": 2}
        for _ in range(2):
            answer = await made.http.post("http://localhost/v1/completions", json=asked)
            assert answer.status_code == 200, answer.text
        names = [list(controller.tenants.samplers) for controller in made.controllers]
        assert [[shard_of(name) for name in own] for own in names] == [[1], [2]]


async def test_a_session_of_a_shard_that_is_gone_is_refused_by_name(tmp_path: Path):
    async with service(config_for(tmp_path, shards=TWO)) as made:
        answer = await made.http.post("/session_heartbeat", json={"session_id": "s3-" + "0" * 16})
        assert answer.status_code == 410
        answer = await made.http.post("/get_info", json={"model_id": "s3-" + "0" * 16 + ":train:0"})
        assert answer.status_code == 404 and "shards.count 2" in answer.text


async def test_a_copied_checkpoint_is_written_by_the_shard_of_its_session(tmp_path: Path):
    async with service(config_for(tmp_path, shards=TWO)) as made:
        saved = await resolved(
            made.http, "/save_weights", model_id=await model_on(made, 1), seq_id=1, path="a"
        )
        session = await session_on(made, 2)
        made.shards[0].state = "dead"
        copy = {"source_path": saved["path"], "session_id": session, "model_seq_id": 7}
        copied = await posted(made.http, "/copy_weights", **copy)
        assert parse_path(copied["tinker_path"]).model_id == f"{session}:train:7"


# a shard that is away


@pytest.mark.parametrize("state", ["dead", "stopped"])
async def test_a_shard_that_is_away_does_not_touch_the_others(tmp_path: Path, state: str):
    async with service(config_for(tmp_path, shards=TWO)) as made:
        model_id = await model_on(made, 2)
        made.shards[0].state = state
        began = time.monotonic()
        await resolved(made.http, "/forward_backward", **batch(model_id, 1))
        assert {shard_of(await session_on(made, 2)) for _ in range(4)} == {2}
        assert (await made.http.get("/healthz")).status_code == 200
        listed = (await made.http.get("/sessions")).json()["sessions"]
        assert {session for session in listed if shard_of(session) == 2} >= {model_id.split(":")[0]}
        assert time.monotonic() - began < 15.0
        shown = (await made.http.get("http://localhost/console/state")).json()
        assert [row["fault"] for row in shown["shards"]] == ["it does not answer", None]


async def test_requests_of_a_shard_that_is_away_wait_for_it(tmp_path: Path):
    async with service(config_for(tmp_path, shards=TWO)) as made:
        model_id = await model_on(made, 1)
        accepted = await posted(made.http, "/forward_backward", **batch(model_id, 1))
        made.shards[0].state = "dead"
        refused = await made.http.post("/optim_step", json={"model_id": model_id, "seq_id": 2})
        assert refused.status_code == 503
        made.shards[0].state = "alive"
        asked = {"request_id": accepted["request_id"]}
        assert (await made.http.post("/retrieve_future", json=asked)).status_code == 200


async def test_a_shard_that_starts_holds_up_no_list(tmp_path: Path):
    async with service(config_for(tmp_path, shards=TWO)) as made:
        calls = keys_of(made.http)
        starting = made.shards[1]
        starting.state = "starting"
        await asyncio.sleep(0.5)
        began = time.monotonic()
        assert await calls.list_requests(None, 10) == []
        assert (await made.http.get("http://localhost/metrics")).status_code == 200
        assert {shard_of(await session_on(made, 1)) for _ in range(3)} == {1}
        assert (await made.http.get("/healthz")).status_code == 200
        assert time.monotonic() - began < 10.0


async def test_an_internal_fault_of_a_shard_is_no_fault_of_the_others(tmp_path: Path):
    async with service(config_for(tmp_path, shards=TWO)) as made:
        await session_on(made, 2)  # from here on it is known that there are no keys
        made.shards[0].state = "broken"
        calls = keys_of(made.http)
        assert await calls.list_requests(None, 10) == []
        assert (await calls.get_capabilities()).names == (MODEL,)
        assert shard_of(await session_on(made, 2)) == 2
        assert (await made.http.get("/healthz")).status_code == 200


async def test_a_process_without_keys_takes_those_of_a_shard_that_answers(tmp_path: Path):
    async with service(config_for(tmp_path, shards=TWO)) as made:
        await keys_of(made.http).add_key(stored(ANN, "ann"), "eve")
        await until(lambda: len(made.controllers[1].admin.keys.names()) == 1)
        made.shards[0].state = "dead"
        new = ShardedClient(made.shards)
        table = await new.calls.known_keys("")
        assert table is not None and [key.name for key in table.keys] == ["ann"]
        await new.close()


async def test_nobody_is_let_in_before_it_is_known_whether_there_are_keys(tmp_path: Path):
    async with service(config_for(tmp_path, shards=TWO)) as made:
        command = ShardedClient(made.shards)  # it shares nothing, as `skyrl-actors key add`
        await command.calls.add_key(stored(ANN, "ann"), "eve")
        await command.close()
        made.shards[0].state = "dead"
        for _ in range(2):
            answer = await made.http.get("/training_runs")
            assert answer.status_code == 503 and "API keys are not known" in answer.text
        made.shards[0].state = "alive"
        await until(lambda: len(made.controllers[1].admin.keys.names()) == 1)
        assert (await made.http.get("/training_runs")).status_code == 401


async def test_keys_of_the_config_need_no_table_of_the_first_shard(tmp_path: Path):
    config = config_for(tmp_path, shards=TWO, http=HttpConfig(api_keys=(f"ann={ANN}",)))
    async with service(config) as made:
        made.shards[0].state = "dead"
        assert (await made.http.get("/training_runs")).status_code == 401
        assert (await holder(made.http, ANN).get("/training_runs")).status_code == 200


async def test_a_mode_that_a_shard_missed_is_set_later(tmp_path: Path):
    async with service(config_for(tmp_path, shards=TWO)) as made:
        calls = keys_of(made.http)
        made.shards[1].state = "dead"
        with pytest.raises(Unavailable, match="shard 2"):
            await calls.set_mode("paused", "eve")
        made.shards[1].state = "alive"
        await until(lambda: made.controllers[1].admin.mode.mode == "paused")


def test_a_drain_is_not_done_while_a_shard_does_not_answer():
    rows = [{"shard": 1, "ready": True}, {"shard": 2, "ready": None}]
    assert still_open({"open_requests": 0, "shards": rows}) == "shard 2 does not answer"
    assert still_open({"open_requests": 3, "shards": rows[:1]}) == "3 requests are open"
    assert still_open({"open_requests": 0}) == ""


async def test_without_any_shard_the_service_is_not_healthy(tmp_path: Path):
    async with service(config_for(tmp_path, shards=TWO)) as made:
        for shard in made.shards:
            shard.state = "dead"
        answer = await made.http.get("/healthz")
        assert answer.status_code == 503 and "shard 1" in answer.text


async def test_a_sum_without_a_shard_is_refused(tmp_path: Path):
    async with service(config_for(tmp_path, shards=TWO)) as made:
        calls = keys_of(made.http)
        made.shards[1].state = "dead"
        with pytest.raises(Unavailable, match="shard 2"):
            await calls.usage(0.0, time.time(), None)


# what the whole service has in common


async def test_one_status_of_all_shards(tmp_path: Path):
    async with service(config_for(tmp_path, shards=TWO)) as made:
        models = [await model_on(made, number) for number in (1, 2)]
        shown = (await made.http.get("http://localhost/console/state")).json()
        assert shown["fault"] is None and shown["sessions"] >= 2
        assert {one["model_id"] for one in shown["models"]} == set(models)
        assert [row["shard"] for row in shown["shards"]] == [1, 2]
        assert [row["sessions"] for row in shown["shards"]] == [
            len(controller.tenants.sessions) for controller in made.controllers
        ]


async def test_a_session_is_active_if_its_own_shard_has_it(tmp_path: Path):
    async with service(config_for(tmp_path, shards=TWO)) as made:
        ended, alive = [await session_on(made, number) for number in (1, 2)]
        await keys_of(made.http).end_session(ended, "eve")
        found = (await posted(made.http, "/sessions/search", statuses=[{"type": "active"}]))[
            "sessions"
        ]
        names = {one["session_id"] for one in found}
        assert alive in names and ended not in names


async def test_metrics_of_all_shards_are_one_valid_text(tmp_path: Path):
    async with service(config_for(tmp_path, shards=TWO)) as made:
        for number in (1, 2):
            await model_on(made, number)
        text = (await made.http.get("http://localhost/metrics")).text
        families = list(text_string_to_metric_families(text))
        assert len({family.name for family in families}) == len(families) > 3
        (serving,) = (one for one in families if one.name == "skyrl_actors_serving")
        services = {sample.labels["service"] for sample in serving.samples}
        assert services == {"skyrl-actors", "skyrl-actors.2"}


async def test_pause_and_resume_concern_all_shards(tmp_path: Path):
    async with service(config_for(tmp_path, shards=TWO)) as made:
        calls = keys_of(made.http)
        for number in (1, 2):
            await session_on(made, number)
        await session_on(made, 1)  # the acts name numbers, which differ
        assert await calls.set_mode("paused", "eve") == "running"
        assert {controller.admin.mode.mode for controller in made.controllers} == {"paused"}
        assert len(await calls.audit(10)) == 1  # one act, though each shard records it
        for mode in ("running", "paused"):  # the same act again, though soon after the first
            await calls.set_mode(mode, "eve")
        assert [entry.act for entry in await calls.audit(10)] == ["pause", "resume", "pause"]


async def test_open_requests_and_failures_of_all_shards_are_listed(tmp_path: Path):
    async with service(config_for(tmp_path, shards=TWO)) as made:
        calls = keys_of(made.http)
        await calls.set_mode("paused", "eve")
        for number in (1, 2):
            session = await session_on(made, number)
            create = {"session_id": session, "model_seq_id": 0, "base_model": MODEL}
            await posted(made.http, "/create_model", **create)
        found = await calls.list_requests(None, 10)
        assert [shard_of(one.request_id) for one in found] == [1, 2]  # oldest first
        assert len(await calls.list_requests(None, 1)) == 1
        for one in found:
            await calls.cancel_request(one.request_id, "eve")
        failed = await calls.list_failures(None, 10)
        assert {shard_of(one.request_id) for one in failed} == {1, 2}


# keys


async def test_a_key_is_valid_on_all_shards_and_its_end_too(tmp_path: Path):
    config = config_for(tmp_path, shards=TWO, http=HttpConfig(api_keys=(f"bob={BOB}",)))
    async with service(config) as made:
        calls, ann = keys_of(made.http), holder(made.http, ANN)
        await calls.add_key(stored(ANN, "ann"), "eve")
        sessions = [await session_on(made, number, ann) for number in (1, 2)]
        owner = owner_of(sessions[0])
        await until(lambda: made.controllers[1].admin.keys.label(owner) == "ann")
        await calls.revoke_key("ann", "eve", 2.0)
        await asyncio.sleep(1.1)
        assert (await ann.get("/get_server_capabilities")).status_code == 401


async def test_limits_of_keys_need_all_sessions_of_a_key_on_one_shard(tmp_path: Path):
    config = config_for(tmp_path, shards=TWO, http=HttpConfig(api_keys=(f"ann={ANN}",)))
    async with service(config) as made:
        with pytest.raises(InvalidRequest, match=r"shards\.spread=key"):
            await keys_of(made.http).set_quota("ann", Quota(requests_per_minute=1), "eve")
        await keys_of(made.http).set_quota("ann", Quota(weight=2.0), "eve")


async def test_with_spread_key_a_limit_holds_for_all_sessions_of_a_key(tmp_path: Path):
    config = config_for(
        tmp_path,
        shards=ShardsConfig(count=2, spread="key"),
        http=HttpConfig(api_keys=(f"ann={ANN}", f"bob={BOB}", "eve=tml-eve-12345")),
    )
    async with service(config) as made:
        ann = holder(made.http, ANN)
        sessions = [(await posted(ann, "/create_session"))["session_id"] for _ in range(4)]
        assert len({shard_of(session) for session in sessions}) == 1
        others = [
            shard_of((await posted(holder(made.http, key), "/create_session"))["session_id"])
            for key in (BOB, "tml-eve-12345")
        ]
        assert {shard_of(sessions[0]), *others} == {1, 2}
        await keys_of(made.http).set_quota("ann", Quota(models=1), "eve")
        await until(lambda: all(own.admin.quotas.all() for own in made.controllers))
        create = {"model_seq_id": 0, "base_model": MODEL}
        await resolved(ann, "/create_model", session_id=sessions[0], **create)
        refused = await ann.post("/create_model", json={"session_id": sessions[1], **create})
        assert refused.status_code == 429, refused.text


async def test_a_shard_that_was_away_gets_the_keys_of_that_time(tmp_path: Path):
    async with service(config_for(tmp_path, shards=TWO)) as made:
        made.shards[1].state = "dead"
        await keys_of(made.http).add_key(stored(ANN, "ann"), "eve")
        made.shards[1].state = "alive"
        await until(lambda: len(made.controllers[1].admin.keys.names()) == 1)


async def test_requests_of_other_shards_do_not_wait_for_keys_while_the_first_is_away(
    tmp_path: Path,
):
    config = config_for(tmp_path, shards=TWO, http=HttpConfig(api_keys=(f"ann={ANN}",)))
    async with service(config) as made:
        ann = holder(made.http, ANN)
        session = await session_on(made, 2, ann)
        made.shards[0].state = "stopped"
        times: list[float] = []
        for _ in range(40):
            began = time.monotonic()
            answer = await ann.post("/session_heartbeat", json={"session_id": session})
            assert answer.status_code == 200
            times.append(time.monotonic() - began)
            await asyncio.sleep(0.1)
        assert sum(one > 0.5 for one in times) <= 1  # one fetch waits for its deadline


async def test_published_checkpoints_of_all_shards_are_listed(tmp_path: Path):
    keys = (f"ann={ANN}", f"bob={BOB}")
    config = config_for(tmp_path, shards=TWO, http=HttpConfig(api_keys=keys))
    async with service(config) as made:
        ann, bob = holder(made.http, ANN), holder(made.http, BOB)
        asked = "/training_runs?access_scope=accessible"
        for number in (1, 2):
            session = await session_on(made, number, ann)
            create = {"session_id": session, "model_seq_id": 0, "base_model": MODEL}
            await resolved(ann, "/create_model", **create)
            model_id = f"{session}:train:0"
            await resolved(ann, "/save_weights", model_id=model_id, seq_id=1, path="a")
            published = f"/training_runs/{model_id}/checkpoints/weights/a/publish"
            assert (await ann.post(published)).status_code == 200
            seen = (await bob.get(asked)).json()["training_runs"]
            assert len(seen) == number


# cleaning up


async def test_a_shard_cleans_up_only_what_is_its_own(tmp_path: Path):
    config = config_for(tmp_path, shards=TWO)
    async with service(config) as made:
        paths: list[str] = []
        for number in (1, 2):
            model_id = await model_on(made, number)
            saved = await resolved(
                made.http, "/save_weights", model_id=model_id, seq_id=1, path="a", ttl_seconds=1000
            )
            paths.append(saved["path"])
    for number, own in enumerate(shard_configs(config), 1):
        later = folders_of(own, lambda: time.time() + 2000)
        ((_, expired),) = later.removal.expired()
        assert later.removal.remove_expired(expired) == 1, number
        assert not later.folder(parse_path(paths[number - 1])).exists()
        assert later.folder(parse_path(paths[-1])).exists() == (number == 1)


async def test_checkpoints_of_a_shard_that_is_gone_can_be_changed(tmp_path: Path):
    async with service(config_for(tmp_path, shards=ShardsConfig(count=3))) as made:
        model_id = await model_on(made, 3)
        await resolved(made.http, "/save_weights", model_id=model_id, seq_id=1, path="a")
    async with service(config_for(tmp_path, shards=TWO)) as made:
        place = f"/training_runs/{model_id}/checkpoints/weights/a"
        assert (await made.http.delete(place)).status_code == 200
        assert (await made.http.get("/checkpoints")).json()["checkpoints"] == []


async def test_the_first_shard_cleans_up_after_shards_that_are_gone(tmp_path: Path):
    config = config_for(tmp_path, shards=TWO)
    async with service(config) as made:
        model_id = await model_on(made, 2)
        body = {"model_id": model_id, "seq_id": 1, "path": "a", "ttl_seconds": 1000}
        await resolved(made.http, "/save_weights", **body)
    alone = config.model_copy(update={"shards": ShardsConfig()})
    assert len(folders_of(alone, lambda: time.time() + 2000).removal.expired()) == 1
