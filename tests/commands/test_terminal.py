"""What clients choose is printed as it is: no markup, and nothing that acts on the terminal."""

import io

import pytest
from rich.console import Console

from skyrl_actors.commands import terminal


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("run [/1] of 3", "run [/1] of 3"),
        ("[link=https://example.com]name[/link]", "[link=https://example.com]name[/link]"),
        ("a\x1b]0;title\x07\x1b[2Jb", "a�]0;title��[2Jb"),
        ("two\rone", "two�one"),
    ],
)
def test_a_cell_is_printed_as_it_is(name: str, shown: str, monkeypatch: pytest.MonkeyPatch):
    written = io.StringIO()
    console = Console(file=written, width=100, force_terminal=True, color_system=None, emoji=False)
    monkeypatch.setattr(terminal, "console", console)
    terminal.show_rows("sessions", [{"session": "s1", "name": name}])
    assert shown in written.getvalue()
    assert "\x1b]" not in written.getvalue() and "\x1b[2J" not in written.getvalue()
