"""API keys of a running service by the real commands, through the unmodified SDK."""

import json
import random
import re
import time
from collections.abc import Iterator

import pytest
import tinker

from bench import faults
from tests.conftest import run_cli
from tests.service.own_service import own_service

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Yield the name and the address of a service that accepts any key."""
    folder = tmp_path_factory.mktemp("keys")
    with own_service("configs/cpu_tiny.yaml", folder, "keys", "critic=null") as served:
        yield served


def key(name: str, *arguments: str) -> str:
    """Run `skyrl-actors key`, and return what it printed."""
    done = run_cli("key", *arguments, "--name", name)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def secret_in(printed: str) -> str:
    found = re.search(r"tml-[0-9a-f]{48}", printed)
    assert found, printed
    return found[0]


def sees(url: str, secret: str) -> bool:
    """Return whether the service accepts a key."""
    client = tinker.ServiceClient(base_url=url, api_key=secret)
    try:
        return bool(client.get_server_capabilities().supported_models)
    except tinker.AuthenticationError:
        return False


def test_keys_are_added_rotated_and_revoked_and_outlive_a_kill(served: tuple[str, str]):
    name, url = served
    assert sees(url, "tml-anybody-1")
    printed = key(name, "add", "ann", "--expires", "30d")
    assert "Until now the service accepted any key" in printed
    ann = secret_in(printed)
    time.sleep(1.1)
    assert sees(url, ann) and not sees(url, "tml-anybody-1")
    with tinker.ServiceClient(base_url=url, api_key=ann) as client:
        model = client.create_lora_training_client("skyrl-actors/tiny", rank=4, seed=1).result()
        path = model.save_state("one").result().path

    assert faults.kill(name, "controller", random.Random(0))
    new = secret_in(key(name, "rotate", "ann", "--grace", "0s"))
    time.sleep(1.1)
    assert sees(url, new) and not sees(url, ann)
    with tinker.ServiceClient(base_url=url, api_key=new) as client:
        found = client.create_rest_client().list_user_checkpoints().result().checkpoints
        assert path in [one.tinker_path for one in found]

    shown = json.loads(key(name, "list", "--json"))
    assert [(one["name"], one["role"]) for one in shown] == [("ann", "tenant")] * 2
    assert new not in json.dumps(shown)
    key(name, "revoke", "ann")
    time.sleep(1.1)
    assert not sees(url, new) and not sees(url, "tml-anybody-1")
    acts = json.loads(key(name, "audit", "--json"))
    assert [act["act"] for act in acts] == ["add", "rotate", "revoke"]
    wrong = run_cli("key", "revoke", "ann", "--name", name)
    assert wrong.returncode == 2 and "`key list` shows all" in wrong.stderr
