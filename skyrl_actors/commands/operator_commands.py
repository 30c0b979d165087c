"""The commands for operators of a running service."""

from typing import Annotated, Any

import typer

from skyrl_actors.messages.errors import ConfigError

PANEL = "Operate a service"
Name = Annotated[str, typer.Option(help="the service's name in its config")]
Limit = Annotated[str | None, typer.Option(help="a number, or none for no limit", metavar="N|none")]
Tenant = Annotated[
    str | None, typer.Option(help="only those of this name or owner; default: those of all")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="do not ask")]
key_app = typer.Typer(
    no_args_is_help=True, help="Add, list, rotate and revoke API keys while a service runs."
)
KeyName = Annotated[
    str, typer.Argument(help="name of the owner; keys of one name share what they create")
]
KeyRole = Annotated[
    str,
    typer.Option(
        help="tenant; read_only, which reads what the name owns; or admin, which sees everything"
    ),
]
Expires = Annotated[str | None, typer.Option(help="after this time, for example 30d or 12h")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


@key_app.command("add")
def key_add(
    owner: KeyName,
    role: KeyRole = "tenant",
    expires: Expires = None,
    name: Name = "skyrl-actors",
) -> None:
    """Add a key to a running service, and print it. It works within a second."""
    from skyrl_actors.commands.keys import add

    add(owner, role, expires, name)


@key_app.command("list")
def key_list(as_json: AsJson = False, name: Name = "skyrl-actors") -> None:
    """List the keys of a running service, without their secrets."""
    from skyrl_actors.commands.keys import show

    show(as_json, name)


@key_app.command("rotate")
def key_rotate(
    owner: KeyName,
    grace: Annotated[str, typer.Option(help="how long the old keys stay valid")] = "24h",
    role: Annotated[str | None, typer.Option(help="default: that of the old keys")] = None,
    expires: Expires = None,
    name: Name = "skyrl-actors",
) -> None:
    """Add a key, and end the other keys of the same name and role after a while."""
    from skyrl_actors.commands.keys import rotate

    rotate(owner, grace, role, expires, name)


@key_app.command("revoke")
def key_revoke(
    which: Annotated[str, typer.Argument(help="the id of a key, or a name for all keys of it")],
    name: Name = "skyrl-actors",
) -> None:
    """Refuse a key from now on, also one of the config. It takes a second at most."""
    from skyrl_actors.commands.keys import revoke

    revoke(which, name)


@key_app.command("audit")
def key_audit(
    last: Annotated[int, typer.Option(help="number of newest acts to list", min=1)] = 50,
    as_json: AsJson = False,
    name: Name = "skyrl-actors",
) -> None:
    """List the newest acts of operators, and as many accesses to published checkpoints."""
    from skyrl_actors.commands.keys import audit

    audit(last, as_json, name)


@key_app.command("line")
def key_line(
    owner: Annotated[
        str,
        typer.Argument(
            help="name of the owner, who keeps models and checkpoints when the key is replaced"
        ),
    ] = "",
) -> None:
    """Create a key for http.api_keys_file, and print it with its line. No service is needed."""
    from skyrl_actors.commands.keys import make

    make(owner)


@key_app.command("limit")
def key_limit(
    which: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="a name, a key's id, or '*' for keys without limits of their own"
        ),
    ] = None,
    requests_per_minute: Limit = None,
    tokens_per_minute: Limit = None,
    tokens_per_day: Limit = None,
    open_requests: Limit = None,
    models: Limit = None,
    samplers: Limit = None,
    checkpoint_bytes: Limit = None,
    weight: Annotated[
        float | None, typer.Option(help="share beside other keys; 2 gets twice that of 1")
    ] = None,
    as_json: AsJson = False,
    name: Name = "skyrl-actors",
) -> None:
    """Set what a name may use, from now on. Without NAME, list what was set.

    Limits that are not given stay as they are. All keys of a name share them. Tokens are those of
    prompts, samples and training. Beyond a limit, SDKs wait and try again; beyond tokens_per_day,
    they pause for up to an hour.
    """
    from skyrl_actors.commands.usage import limit, limits

    options: dict[str, Any] = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "tokens_per_day": tokens_per_day,
        "open_requests": open_requests,
        "models": models,
        "samplers": samplers,
        "checkpoint_bytes": checkpoint_bytes,
        "weight": weight,
    }
    given = {key: value for key, value in options.items() if value is not None}
    if which is not None:
        limit(which, given, as_json, name)
    elif given:
        raise ConfigError(f"whose {min(given)}? Give a name, or '*' for names without limits")
    else:
        limits(as_json, name)


def usage(
    since: Annotated[
        str | None, typer.Option(help="first day in UTC, for example 2026-11-01; default: 7 ago")
    ] = None,
    until: Annotated[str | None, typer.Option(help="last day; default: today")] = None,
    by: Annotated[str, typer.Option(help="a row for each name and: day, hour or session")] = "day",
    csv: Annotated[bool, typer.Option("--csv", help="print CSV")] = False,
    as_json: AsJson = False,
    name: Name = "skyrl-actors",
) -> None:
    """Show what each API key used: requests, tokens and checkpoints."""
    from skyrl_actors.commands.usage import show

    show(since, until, by, "csv" if csv else "json" if as_json else "table", name)


def sessions(
    every: Annotated[bool, typer.Option("--all", help="ended ones too")] = False,
    as_json: AsJson = False,
    name: Name = "skyrl-actors",
) -> None:
    """List the sessions of a running service, newest first."""
    from skyrl_actors.commands.operate import sessions as run

    run(every, as_json, name)


def models(as_json: AsJson = False, name: Name = "skyrl-actors") -> None:
    """List the models of a running service, with their tenants and queued requests."""
    from skyrl_actors.commands.operate import models as run

    run(as_json, name)


def requests(
    tenant: Tenant = None,
    last: Annotated[int, typer.Option(help="number of oldest requests to list", min=1)] = 50,
    as_json: AsJson = False,
    name: Name = "skyrl-actors",
) -> None:
    """List requests that are accepted and not answered, oldest first."""
    from skyrl_actors.commands.operate import requests as run

    run(tenant, last, as_json, name)


def failures(
    tenant: Tenant = None,
    last: Annotated[int, typer.Option(help="number of newest failures to list", min=1)] = 50,
    as_json: AsJson = False,
    name: Name = "skyrl-actors",
) -> None:
    """List requests that failed since the controller started, newest first."""
    from skyrl_actors.commands.operate import failures as run

    run(tenant, last, as_json, name)


def logs(
    part: Annotated[
        str, typer.Argument(help="controller, engine:0, policy:0, critic:0 and so on")
    ] = "controller",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="print new lines, too")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", help="number of newest lines")] = 100,
    printed: Annotated[
        bool, typer.Option("--printed", help="what the process printed, instead of its log")
    ] = False,
    name: Name = "skyrl-actors",
) -> None:
    """Print the log of one part of a running service, on whatever machine it is."""
    from skyrl_actors.commands.logs import show

    show(part, follow, lines, printed, name)


def end(
    session: Annotated[str, typer.Argument(help="the id of a session")],
    yes: Yes = False,
    name: Name = "skyrl-actors",
) -> None:
    """End a session: its queued requests fail, and its models and samplers are freed.

    Checkpoints stay.
    """
    from skyrl_actors.commands.operate import end as run

    if not yes:
        typer.confirm(f"end {session}, and free its models?", abort=True)
    run(session, name)


def cancel(
    request: Annotated[str, typer.Argument(help="the id of a request")],
    name: Name = "skyrl-actors",
) -> None:
    """Let an open request fail. A request that runs on a model cannot be cancelled."""
    from skyrl_actors.commands.operate import cancel as run

    run(request, name)


def pause(name: Name = "skyrl-actors") -> None:
    """Start no more requests. New ones are accepted and wait, also over a restart."""
    from skyrl_actors.commands.operate import set_mode

    set_mode("paused", name)


def drain(
    timeout: Annotated[
        str, typer.Option(help="how long to wait for open requests, for example 10m; 0s: not")
    ] = "10m",
    name: Name = "skyrl-actors",
) -> None:
    """Accept no new requests, and wait until the accepted ones are answered.

    Clients get 503, which SDKs retry for minutes. `resume` ends it.
    """
    from skyrl_actors.commands.operate import drain as run

    if not run(timeout, name):
        raise typer.Exit(1)


def resume(name: Name = "skyrl-actors") -> None:
    """Accept and start requests again, after `pause` or `drain`."""
    from skyrl_actors.commands.operate import set_mode

    set_mode("running", name)


COMMANDS = (
    usage,
    sessions,
    models,
    requests,
    failures,
    logs,
    end,
    cancel,
    pause,
    drain,
    resume,
)


def add_to(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.add_typer(key_app, name="key", rich_help_panel=PANEL)
    for command in COMMANDS:
        app.command(rich_help_panel=PANEL)(command)
