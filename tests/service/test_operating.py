"""Operators' commands on a running service, beside an SDK's client."""

import csv
import io
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import tinker
from tinker import types

from tests.conftest import run_cli
from tests.service.own_service import own_service

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Yield the name and the address of a service."""
    folder = tmp_path_factory.mktemp("operating")
    with own_service("configs/cpu_tiny.yaml", folder, "operating", "critic=null") as served:
        yield served


def cli(name: str, *arguments: str) -> str:
    done = run_cli(*arguments, "--name", name)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def listed(name: str, *arguments: str) -> list[dict[str, Any]]:
    return json.loads(cli(name, *arguments, "--json"))


def datum() -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4]},
    )


def test_an_operator_is_in_control(served: tuple[str, str]):
    name, url = served
    secret = cli(name, "key", "add", "ann").split()[1]
    time.sleep(1.1)
    client = tinker.ServiceClient(base_url=url, api_key=secret)
    model = client.create_lora_training_client("skyrl-actors/tiny", rank=4, seed=1).result()
    model.forward_backward([datum()], "cross_entropy").result()

    (session,) = listed(name, "sessions")
    assert session["tenant"] == "ann" and session["state"] == "active" and session["models"] == 1
    (shown,) = listed(name, "models")
    assert shown["tenant"] == "ann"

    cli(name, "pause")
    stepping = model.optim_step(types.AdamParams(learning_rate=1e-3))
    for _ in range(50):
        waiting = listed(name, "requests", "--tenant", "ann")
        if waiting:
            break
        time.sleep(0.2)
    assert [(one["kind"], one["state"]) for one in waiting] == [("OptimStep", "waiting")]
    assert "paused" in cli(name, "status")
    cli(name, "resume")
    stepping.result(timeout=60)

    assert "no request is open" in cli(name, "drain", "--timeout", "60s")
    stepping = model.forward_backward([datum()], "cross_entropy")  # the SDK tries again
    time.sleep(1)
    assert listed(name, "requests") == []
    cli(name, "resume")
    stepping.result(timeout=60)

    cli(name, "key", "limit", "ann", "--tokens-per-day", "1", "--weight", "2")
    limits = listed(name, "key", "limit")
    assert [(one["name"], one["quota"]["tokens_per_day"]) for one in limits] == [("ann", 1)]
    cli(name, "key", "limit", "ann", "--tokens-per-day", "none")
    (kept,) = listed(name, "key", "limit")
    assert (kept["quota"]["tokens_per_day"], kept["quota"]["weight"]) == (None, 2.0)

    rows = list(csv.DictReader(io.StringIO(cli(name, "usage", "--csv"))))
    assert {row["name"] for row in rows} == {"ann"}
    assert sum(int(row["trained_tokens"]) for row in rows) == 6
    events = tinker.AdminClient(base_url=url, api_key=secret).get_billing_usage
    now = time.time() // 3600 * 3600
    window = [
        time.strftime("%Y-%m-%dT%H:00:00Z", time.gmtime(at)) for at in (now - 3600, now + 3600)
    ]
    trained = [
        e.event_info for e in events(*window).result().data if e.event_info.type == "training"
    ]
    assert sum(one.token_count for one in trained) == 6

    assert listed(name, "failures", "--tenant", "ann") == []
    rest = client.create_rest_client()
    saved = model.save_state("one").result().path
    with pytest.raises(tinker.TinkerError, match="exists already"):
        model.save_state("one").result()
    (failed,) = listed(name, "failures")
    assert failed["tenant"] == "ann" and failed["fault of"] == "user"
    assert saved in [one.tinker_path for one in rest.list_user_checkpoints().result().checkpoints]

    assert "training groups ready" in cli(name, "logs")
    assert "vLLM" in cli(name, "logs", "engine:0", "-n", "1000")
    odd = run_cli("logs", "engine:7", "--name", name)
    assert odd.returncode == 2 and "it has controller, engine:0, policy:0" in odd.stderr

    cli(name, "end", session["session"], "--yes")
    assert listed(name, "sessions") == [] and listed(name, "models") == []
    acts = [act["act"] for act in listed(name, "key", "audit")]
    assert acts == ["add", "pause", "resume", "drain", "resume", "limit", "limit", "end"]
    unknown = run_cli("end", "s0", "--yes", "--name", name)
    assert unknown.returncode == 2 and "unknown session 's0'" in unknown.stderr
