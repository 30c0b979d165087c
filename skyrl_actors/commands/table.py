"""docs/cli.md, from the commands themselves: python -m skyrl_actors.commands.table > docs/cli.md"""

import inspect
from typing import Any

import typer

from skyrl_actors.__main__ import app

HEAD = """# Command line

As `python -m skyrl_actors.commands.table` prints it. `skyrl-actors COMMAND --help` says the same in the terminal. Exit codes: 0 done, 1 a check failed
(`doctor`), 2 a mistake in what was given or a service that is not there, 130 interrupted, with everything ended that was started.
"""


def markdown() -> str:
    group: Any = typer.main.get_command(app)
    context = group.make_context("skyrl-actors", [], resilient_parsing=True)
    parts = [HEAD]
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        about = " ".join(inspect.cleandoc(command.help or "").split())
        usage = " ".join(["skyrl-actors", name, *command.collect_usage_pieces(context)])
        rows = [_row(parameter) for parameter in command.params if parameter.name != "help"]
        table = "\n| | | default |\n|---|---|---|\n" + "".join(rows) if rows else ""
        parts.append(f"## {name}\n\n{about}\n\n```text\n{usage}\n```\n{table}")
    return "\n".join(parts)


def _row(parameter: Any) -> str:
    given = parameter.default
    default = "" if given in (None, "", False) or parameter.required else f"`{given}`"
    name = parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.name.upper()
    return f"| `{name}` | {parameter.help or ''} | {default} |\n"


if __name__ == "__main__":
    print(markdown(), end="")
