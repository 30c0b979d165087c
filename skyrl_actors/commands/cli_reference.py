"""Generate docs/reference/cli.md.

Run `python -m skyrl_actors.commands.cli_reference > docs/reference/cli.md`.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from skyrl_actors.__main__ import app

HEAD = """# Command line

`skyrl-actors COMMAND --help` prints the same text in the terminal.
`python -m skyrl_actors.commands.cli_reference` generates this page.

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | `doctor` or `check` found a fault, a service does not serve (`status`), or `drain` timed out |
| 2 | wrong arguments, a wrong config, or no such service |
| 130 | interrupted; everything that the command started has been stopped |
"""


def markdown() -> str:
    """Return the whole page."""
    group: Any = typer.main.get_command(app)
    context = group.make_context("skyrl-actors", [], resilient_parsing=True)
    parts = [HEAD]
    for name, command in _commands(group, context, ""):
        about = " ".join(inspect.cleandoc(command.help or "").split())
        usage = " ".join(["skyrl-actors", name, *command.collect_usage_pieces(context)])
        rows = [_row(parameter) for parameter in command.params if parameter.name != "help"]
        table = (
            "\n| argument | meaning | default |\n|---|---|---|\n" + "".join(rows) if rows else ""
        )
        parts.append(f"## {name}\n\n{about}\n\n```text\n{usage}\n```\n{table}")
    return "\n".join(parts)


def _commands(group: Any, context: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield all commands, those of groups with the name of their group."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if hasattr(command, "list_commands"):
            yield from _commands(command, context, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def _row(parameter: Any) -> str:
    given = parameter.default
    default = "" if given in (None, "", False) or parameter.required else f"`{given}`"
    name = parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.name.upper()
    return f"| `{name}` | {parameter.help or ''} | {default} |\n"


if __name__ == "__main__":
    print(markdown(), end="")
