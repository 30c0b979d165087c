"""The command line `skyrl-actors`."""

import os
import secrets
import signal
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from skyrl_actors.commands import operator_commands
from skyrl_actors.messages.errors import SkyrlActorsError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Config = Annotated[Path, typer.Argument(help="a YAML file, for example configs/cpu_tiny.yaml")]
Target = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|CONFIG",
        help="a model's folder or its name on the Hugging Face hub, for example Qwen/Qwen3-1.7B; "
        "or a YAML file, for example configs/cpu_tiny.yaml",
    ),
]
Name = operator_commands.Name
Pinned = Annotated[
    Path | None,
    typer.Option("--config", help="with a MODEL: a YAML file whose keys the layout keeps"),
]
Write = Annotated[
    Path | None,
    typer.Option(help="with a MODEL: the YAML file to write; default: MODEL-service.yaml here"),
]
Gpus = Annotated[
    str | None,
    typer.Option(help="GPUs to plan for, for example 8xH100, 1xRTX4090 or 2x8xH200"),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="key.sub=value …, which override the file")
]
INTERRUPTED = 130
# Typer contains a copy of click
USAGE_ERROR: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
RAY_TOKEN = Path.home() / ".ray" / "auth_token"
DEMO_CONFIG = Path("configs/jobs/ppo_tiny.yaml")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(version("skyrl-actors"))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, help="print the version", is_eager=True),
    ] = False,
) -> None:
    """Post-train language models by reinforcement learning on a Ray cluster.

    Every command has --help.
    """


@app.command(rich_help_panel="Training")
def demo(overrides: Overrides = None) -> None:
    """Train a tiny model with PPO on this machine.

    It uses Ray and vLLM, takes a few minutes and needs no GPU.
    """
    from skyrl_actors.commands.train import train as run

    run(DEMO_CONFIG, overrides or [])


@app.command(rich_help_panel="Before you start")
def init(
    folder: Annotated[Path, typer.Argument(help="where to write; default: here")] = Path(),
) -> None:
    """Write a project to start from: a config, a reward function and data.

    Nothing is overwritten.
    """
    from skyrl_actors.commands.init import run

    run(folder)


@app.command(rich_help_panel="Training")
def train(
    config: Config,
    overrides: Overrides = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="train this model instead: a folder or a name on the hub. The layout is chosen "
            "for it and the devices that are there, in place of the file's `cluster`"
        ),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(help="with --model: the YAML file to write; default: MODEL-JOB.yaml here"),
    ] = None,
) -> None:
    """Run a training job. An interrupted run with the same run.name and config is resumed.

    The command joins the Ray cluster in RAY_ADDRESS, which `ray job submit` sets. Without
    RAY_ADDRESS it starts Ray and stops it at the end.
    """
    from skyrl_actors.commands.train import train as run

    if model is not None:
        from skyrl_actors.commands.sized import job_file

        config, overrides = job_file(config, model, overrides or [], write), []
    elif write is not None:
        raise typer.BadParameter("--write needs --model")
    run(config, overrides or [])


@app.command(rich_help_panel="Training")
def runs(
    folder: Annotated[
        Path, typer.Argument(help="folder that contains the runs (run.folder)")
    ] = Path("runs"),
    json: Annotated[bool, typer.Option(help="print JSON")] = False,
) -> None:
    """List training runs with state, metric before and after, steps and seconds."""
    from skyrl_actors.commands.runs import show

    show(folder, json)


@app.command(rich_help_panel="Training")
def report(
    run: Annotated[Path, typer.Argument(help="the folder of a run, for example runs/ppo_tiny")],
) -> None:
    """Write report.html of a run, which can still be running.

    The file contains curves, time shares, rollouts, metrics and the config.
    """
    from skyrl_actors.commands.runs import report as write

    write(run)


@app.command(rich_help_panel="Service")
def serve(
    target: Target,
    overrides: Overrides = None,
    block: Annotated[
        bool, typer.Option(help="stay in the foreground; Ctrl-C stops the service")
    ] = False,
    config: Pinned = None,
    write: Write = None,
    dry_run: Annotated[
        bool, typer.Option(help="print the plan and start nothing, as `plan` does")
    ] = False,
) -> None:
    """Start a service for a model, or with a config file.

    For a model, the fastest layout that fits the devices is chosen, printed and written to a YAML
    file. Overrides are kept as they are. The service joins the Ray cluster of this machine, or
    starts one.
    """
    from skyrl_actors.commands.sized import is_config, refuse_for_config, service_file

    refuse_for_config(target, config=config, write=write)
    if dry_run:
        from skyrl_actors.commands.plan import run as show

        show(target, overrides or [], config=config, write=write)
        return
    from skyrl_actors.commands.serve import run

    if is_config(target):
        run(target, overrides or [], block)
    else:
        run(service_file(target, config, overrides or [], write), [], block)


@app.command(rich_help_panel="Service")
def status(
    name: Name = "skyrl-actors",
    json: Annotated[bool, typer.Option(help="print JSON")] = False,
) -> None:
    """Show models, phase, groups, engines and queue of a running service.

    The exit code is 1 while it does not serve requests.
    """
    from skyrl_actors.commands.serve import status as run

    if not run(name, json):
        raise typer.Exit(1)


@app.command(rich_help_panel="Service")
def trace(
    output: Annotated[Path, typer.Argument(help="the file to write")] = Path("trace.json"),
    name: Name = "skyrl-actors",
) -> None:
    """Write a trace of a running service for Perfetto or chrome://tracing.

    It contains the latest phases, operations and transfers.
    """
    from skyrl_actors.commands.trace import run

    run(name, output)


@app.command(rich_help_panel="Service")
def stop(name: Name = "skyrl-actors") -> None:
    """Stop a service. If `serve` started Ray, Ray is stopped too."""
    from skyrl_actors.commands.serve import stop as run

    run(name)


@app.command(rich_help_panel="Service")
def journal(
    config: Config,
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option(help="list the operations of this model; default: list the models")
    ] = None,
    last: Annotated[int, typer.Option(help="number of newest operations to list", min=1)] = 50,
    json: Annotated[bool, typer.Option(help="print JSON")] = False,
) -> None:
    """List the requests that a service accepted and what came of them.

    A new model can start from any past step, as `tinker://<model id>/steps/<n>`.
    """
    from skyrl_actors.commands.journal import run

    run(config, overrides or [], model, last, json)


@app.command(rich_help_panel=operator_commands.PANEL)
def upgrade(
    config: Config,
    overrides: Overrides = None,
    drop_keys: Annotated[
        bool,
        typer.Option("--drop-keys", help="let configured API keys end that the given config lacks"),
    ] = False,
) -> None:
    """Let a running service use the installed version, without losing a client.

    Install the new version where the service runs, then run this with the service's config.
    Controller and HTTP endpoint are replaced, and clients wait for seconds. Ranks and engines stay
    if they speak the same protocol and have the same configuration; others are restarted, and their
    models come back from the journal.
    """
    from skyrl_actors.commands.upgrade import run

    run(config, overrides or [], drop_keys)


@app.command(rich_help_panel=operator_commands.PANEL)
def backup(
    config: Config,
    target: Annotated[Path, typer.Argument(help="a new folder for the copy")],
    overrides: Overrides = None,
    since: Annotated[
        Path | None,
        typer.Option(help="an earlier backup on the same disk; its unchanged files are linked"),
    ] = None,
) -> None:
    """Copy journal and checkpoints of a service as one consistent set, also while it runs.

    The copy of a PostgreSQL database is a file in the folder, too.
    """
    from skyrl_actors.commands.backup import backup as run

    run(config, target, overrides or [], since)


@app.command(rich_help_panel=operator_commands.PANEL)
def restore(
    source: Annotated[Path, typer.Argument(metavar="BACKUP", help="the folder of a backup")],
    config: Config,
    overrides: Overrides = None,
) -> None:
    """Check a backup, and put it in the empty places that a config names.

    A backup can be restored to SQLite or, with `journal.url`, to an empty PostgreSQL database.
    """
    from skyrl_actors.commands.restore import restore as run

    run(source, config, overrides or [])


@app.command(rich_help_panel=operator_commands.PANEL)
def check(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="BACKUP|CONFIG", help="the folder of a backup, or a service's YAML file"
        ),
    ],
    overrides: Overrides = None,
) -> None:
    """Read every record of a journal and every checkpoint, and list what is damaged."""
    from skyrl_actors.commands.restore import check as run

    if not run(target, overrides or []):
        raise typer.Exit(1)


@app.command(rich_help_panel="Before you start")
def plan(
    target: Target,
    overrides: Overrides = None,
    gpus: Gpus = None,
    nodes: Annotated[
        Path | None,
        typer.Option(
            help="a Ray cluster-launcher file; default: the running Ray cluster, or this machine"
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="a config.json, its folder, or a name on the Hugging Face hub, to read the "
            "model's sizes from; for a model that is not on this machine"
        ),
    ] = None,
    config: Pinned = None,
    write: Write = None,
) -> None:
    """Print the placement of all actors and the memory of each device in each phase.

    Nothing is started.

    For a model, the fastest layout that fits the devices is chosen first. If nothing fits, the
    reason is printed, with a change or a cluster that would. Configs of services and of jobs are
    accepted too.
    """
    from skyrl_actors.commands.plan import run

    run(target, overrides or [], nodes, model, gpus=gpus, config=config, write=write)


@app.command(rich_help_panel="Before you start")
def doctor(
    port: Annotated[int, typer.Option(help="port of the endpoint to check")] = 8000,
    name: Name = "skyrl-actors",
) -> None:
    """Check this machine, and print a remedy for each failure.

    The checks cover versions, the PyTorch build, vLLM, memory and ports. If the service runs, it
    also prints the attention, head, optimizers and transfer that its ranks use.
    """
    from skyrl_actors.commands.doctor import run

    if not run(port, name):
        raise typer.Exit(1)


operator_commands.add_to(app)


def use_ray_token(create: bool = True) -> None:
    """Make a Ray that is started here require the token in ~/.ray/auth_token.

    Ray's ports are open to the network.

    Ray reads the mode once, at import, so this must be called first. Commands that do not start Ray
    do not create a token.
    """
    if (
        "RAY_AUTH_MODE" in os.environ
        or "RAY_ADDRESS" in os.environ
        or not (create or RAY_TOKEN.exists())
    ):
        return
    if not RAY_TOKEN.exists():
        RAY_TOKEN.parent.mkdir(mode=0o700, exist_ok=True)
        RAY_TOKEN.touch(mode=0o600)
        RAY_TOKEN.write_text(secrets.token_hex(32))
    os.environ["RAY_AUTH_MODE"] = "token"


def main() -> None:
    """Run the command line.

    User errors are printed without a traceback. Ctrl-C and SIGTERM clean up and exit with 130.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    starts = sys.argv[1:2] in (["demo"], ["train"], ["serve"])
    use_ray_token(create=starts)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    # shells start background commands with SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = app(standalone_mode=False)
    except SkyrlActorsError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except USAGE_ERROR as error:
        error.show()
        if keys := [text[2:] for text in sys.argv[1:] if text.startswith("--") and "." in text]:
            key = keys[0].partition("=")[0]
            print(f"a key of the config is written without dashes: {key}=value", file=sys.stderr)
        sys.exit(2)
    if code == INTERRUPTED:
        stopped = ": everything that was started has been stopped" if starts else ""
        print(f"interrupted{stopped}", file=sys.stderr)
    sys.exit(code or 0)


if __name__ == "__main__":
    main()
