"""`key limit` shows what was set, and drops no option."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from skyrl_actors.__main__ import app
from skyrl_actors.commands import usage
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.messages.usage import OwnerQuota, Quota

ANN = OwnerQuota(owner="0123456789", name="ann", quota=Quota(tokens_per_day=5))


@pytest.fixture(autouse=True)
def service(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(_: str, act: Callable[[Any], Any]) -> Any:
        return ANN if act.__name__ == "change" else [ANN]

    monkeypatch.setattr(usage, "asked", asked)


@pytest.mark.parametrize("words", [["ann", "--tokens-per-day", "5"], ["ann"], []])
def test_limits_are_printed_as_json_when_asked(words: list[str]):
    printed = CliRunner().invoke(app, ["key", "limit", *words, "--json"])
    (shown,) = json.loads(printed.output)
    assert shown["name"] == "ann" and shown["quota"]["tokens_per_day"] == 5


def test_a_limit_without_a_name_is_refused():
    printed = CliRunner().invoke(app, ["key", "limit", "--tokens-per-day", "5"])
    assert isinstance(printed.exception, ConfigError)
    assert str(printed.exception).startswith("whose tokens_per_day? Give a name")
