"""`upgrade` of several shards: one that does not start hinders no other, and it can be repeated."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from skyrl_actors.commands import upgrade
from skyrl_actors.commands.serve import refuse_other_config
from skyrl_actors.config.cluster import ClusterConfig, HttpConfig
from skyrl_actors.config.load import KEYS_VARIABLE
from skyrl_actors.messages.errors import ConfigError, InternalError

CONFIG = Path("configs/cpu_tiny.yaml")
THREE = ["name=svc", "shards.count=3", "critic=null"]


class Service:
    """What `upgrade` does to a service. `broken`: names of shards that do not start."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.log: list[str] = []
        self.broken: set[str] = set()
        self.running = {"svc"}  # the controllers
        self.parts = ["svc:policy[0]"]
        self.mode = "running"
        patch.setattr(upgrade.ray, "is_initialized", lambda: True)
        patch.setattr(
            upgrade.remote, "named", lambda name: self.running & {name.split(":")[0]} or None
        )
        patch.setattr(upgrade.remote, "names_with", lambda _: self.parts)
        patch.setattr(upgrade.remote, "end_named", self.end)
        patch.setattr(upgrade.cluster, "start_controller", self.start)
        patch.setattr(upgrade.cluster, "prepare_base_models", lambda _: {})
        patch.setattr(upgrade, "reading", lambda _: nullcontext())
        patch.setattr(upgrade, "_check_same_state", lambda *_: self.log.append("compared"))
        patch.setattr(upgrade.operate, "mode_of", lambda _: self.mode)
        patch.setattr(upgrade.operate, "set_mode", lambda mode, _: self.log.append(mode))
        patch.setattr(upgrade, "share_settings", self.share)
        patch.setattr(upgrade.serve, "start_ingress", lambda _: self.log.append("ingress"))
        patch.setattr(upgrade.serve, "wait_until_healthy", lambda _: self.log.append("healthy"))
        patch.setattr(upgrade.serve, "join", self.join)

    async def end(self, names: Any) -> None:
        self.log.append(f"end {names[0].split(':')[0]}")

    async def start(self, config: ClusterConfig, _: Any) -> None:
        if config.name in self.broken:
            raise InternalError("no room")
        self.log.append(f"start {config.name}")

    async def share(self, _: Any) -> None:
        self.log.append("share")

    def join(self, name: str) -> None:
        raise ConfigError(f"no service named {name!r} runs here")


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    return Service(monkeypatch)


def test_all_shards_are_replaced_and_then_the_ingress(service: Service):
    upgrade.run(CONFIG, THREE, drop_keys=False)
    names = ("svc", "svc.2", "svc.3")
    assert service.log[0] == "compared" and service.log[-3:] == ["ingress", "share", "healthy"]
    assert set(service.log[1:-3]) == {f"{act} {name}" for act in ("end", "start") for name in names}


def test_settings_are_compared_with_those_of_the_shard_that_runs(
    service: Service, monkeypatch: pytest.MonkeyPatch
):
    compared: list[Any] = []
    monkeypatch.setattr(upgrade, "_check_same_state", lambda *found: compared.extend(found))
    service.running = {"svc.2"}  # that of the first shard ended late in an earlier upgrade
    upgrade.run(CONFIG, THREE, drop_keys=False)
    own, controller, _ = compared
    assert own.name == "svc.2" and own.journal.folder.name == "journal_2"
    assert controller == {"svc.2"}


@pytest.mark.parametrize(("mode", "last"), [("draining", "running"), ("paused", "healthy")])
def test_an_upgrade_ends_a_drain(service: Service, mode: str, last: str):
    service.mode = mode
    upgrade.run(CONFIG, THREE, drop_keys=False)
    assert service.log[-1] == last


def test_a_shard_that_does_not_start_is_named_and_the_others_are_served(service: Service):
    service.broken = {"svc.2"}
    with pytest.raises(
        InternalError, match=r"^shard 2 did not start: no room\. The other shards run"
    ):
        upgrade.run(CONFIG, THREE, drop_keys=False)
    assert {"start svc", "start svc.3"} < set(service.log) and service.log[-1] == "ingress"


def test_an_interrupted_upgrade_is_repeated(service: Service):
    service.running = set()
    upgrade.run(CONFIG, THREE, drop_keys=False)
    assert "compared" not in service.log and service.log[-1] == "healthy"
    service.parts = []
    with pytest.raises(ConfigError, match="no service named"):
        upgrade.run(CONFIG, THREE, drop_keys=False)


class Controller:
    """The controller of a service that runs with this config."""

    def __init__(self, config: ClusterConfig):
        self.settings = self
        self.remote = lambda: config


def test_keys_of_a_running_service_do_not_end_by_mistake(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(upgrade.typed_ray, "get", lambda found, timeout: found)

    def upgraded(keys: tuple[str, ...], drop_keys: bool = False) -> None:
        wanted = ClusterConfig(http=HttpConfig(api_keys=keys))
        upgrade._check_same_state(wanted, Controller(running), drop_keys)  # type: ignore[arg-type]

    both = ("ann=tml-ann-12345", "tml-bob-12345")
    running = ClusterConfig(http=HttpConfig(api_keys=both))
    upgraded((*both, "carol=tml-carol-12345"))
    with pytest.raises(ConfigError, match=r"keys that this config lacks: ann; set .*--drop-keys"):
        upgraded(both[1:])
    with pytest.raises(ConfigError, match=r"lacks: ann, sha256:[0-9a-f]{10};"):
        upgraded(())
    upgraded((), drop_keys=True)
    with pytest.raises(ConfigError, match="runs with API keys, and this config has none"):
        refuse_other_config(running, ClusterConfig())
    refuse_other_config(running, ClusterConfig(http=HttpConfig(api_keys=both[:1])))


def test_processes_of_ray_inherit_no_api_keys(monkeypatch: pytest.MonkeyPatch):
    given: list[dict[str, str]] = []
    monkeypatch.setattr(upgrade.cluster.subprocess, "run", lambda *_, env, **__: given.append(env))
    monkeypatch.setenv(KEYS_VARIABLE, "ann=tml-ann-12345")
    monkeypatch.setenv("HF_HOME", "/models")
    upgrade.cluster.ray_command("start", environment={"RAY_AUTH_MODE": "token"})
    assert KEYS_VARIABLE not in given[0]
    assert given[0]["HF_HOME"] == "/models" and given[0]["RAY_AUTH_MODE"] == "token"
