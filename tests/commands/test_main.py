"""The command line's answers to arguments that it does not know."""

import sys
from importlib.metadata import version

import pytest

from skyrl_actors import __main__


def test_a_key_with_dashes_is_answered_with_the_right_form(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(__main__, "use_ray_token", lambda create: None)
    arguments = ["skyrl-actors", "serve", "c.yaml", "--http.port", "9"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 2
    assert "written without dashes: http.port=value" in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        __main__.app(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == version("skyrl-actors")
