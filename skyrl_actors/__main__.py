"""The command line: demo, train, runs, report, serve, status, trace, stop, key, journal, plan, doctor."""

import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from skyrl_actors.messages.errors import SkyrlActorsError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Post-train language models by reinforcement learning on a Ray cluster. Every command has --help.",
)
Config = Annotated[Path, typer.Argument(help="a YAML file, e.g. configs/cpu_tiny.yaml")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key.sub=value …, over the file")]
INTERRUPTED = 130
USAGE_ERROR: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")  # typer brings its own click
RAY_TOKEN = Path.home() / ".ray" / "auth_token"
DEMO_CONFIG = Path(__file__).parent.parent / "configs" / "jobs" / "ppo_tiny.yaml"


@app.command(rich_help_panel="Training")
def demo(overrides: Overrides = None) -> None:
    """Watch PPO learn on this machine: a tiny model, real Ray and vLLM, a few minutes, no GPU."""
    from skyrl_actors.commands.train import train as run

    run(DEMO_CONFIG, overrides or [])


@app.command(rich_help_panel="Training")
def train(config: Config, overrides: Overrides = None) -> None:
    """Run a training job, or go on with one that was interrupted (same run.name, same config). Joins the Ray cluster in
    RAY_ADDRESS (set inside `ray job submit`), else starts its own."""
    from skyrl_actors.commands.train import train as run

    run(config, overrides or [])


@app.command(rich_help_panel="Training")
def runs(
    folder: Annotated[Path, typer.Argument(help="where runs are kept (run.folder)")] = Path("runs"),
    json: Annotated[bool, typer.Option(help="machine-readable")] = False,
) -> None:
    """List training runs beside each other: state, metric before and after, steps, seconds."""
    from skyrl_actors.commands.runs import show

    show(folder, json)


@app.command(rich_help_panel="Training")
def report(run: Annotated[Path, typer.Argument(help="the folder of a run, e.g. runs/ppo_tiny")]) -> None:
    """Write report.html of a run, finished or not: curves, time shares, rollouts, metrics, config, in one file."""
    from skyrl_actors.commands.runs import report as write

    write(run)


@app.command(rich_help_panel="Service")
def serve(
    config: Config,
    overrides: Overrides = None,
    block: Annotated[bool, typer.Option(help="stay in the foreground; Ctrl-C stops the service")] = False,
) -> None:
    """Start the Tinker endpoint: joins the Ray cluster of this machine, or starts one."""
    from skyrl_actors.commands.serve import run

    run(config, overrides or [], block)


Name = Annotated[str, typer.Option(help="the service's name in its config")]


@app.command(rich_help_panel="Service")
def status(name: Name = "skyrl-actors", json: Annotated[bool, typer.Option(help="machine-readable")] = False) -> None:
    """Models, phase, groups, engines and queue of a running service."""
    from skyrl_actors.commands.serve import status as run

    run(name, json)


@app.command(rich_help_panel="Service")
def trace(
    output: Annotated[Path, typer.Argument(help="the file to write")] = Path("trace.json"),
    name: Name = "skyrl-actors",
) -> None:
    """Write the last phases, operations and transfers of a running service as a trace for Perfetto or chrome://tracing."""
    from skyrl_actors.commands.trace import run

    run(name, output)


@app.command(rich_help_panel="Service")
def key(
    name: Annotated[str, typer.Argument(help="who will hold it; what he makes stays his when the key is replaced")] = "",
) -> None:
    """Make an API key: for its holder, and as the line that goes into http.api_keys_file."""
    from skyrl_actors.commands.keys import make

    make(name)


@app.command(rich_help_panel="Service")
def stop(name: Name = "skyrl-actors") -> None:
    """End a service, and Ray with it if `serve` started Ray."""
    from skyrl_actors.commands.serve import stop as run

    run(name)


@app.command(rich_help_panel="Service")
def journal(
    config: Config,
    overrides: Overrides = None,
    model: Annotated[str | None, typer.Option(help="list the operations of this model; without it, the models")] = None,
    last: Annotated[int, typer.Option(help="only so many of the newest operations", min=1)] = 50,
    json: Annotated[bool, typer.Option(help="machine-readable")] = False,
) -> None:
    """What a service promised and did. A new model can start from any past step: tinker://<model id>/steps/<n>."""
    from skyrl_actors.commands.journal import run

    run(config, overrides or [], model, last, json)


@app.command(rich_help_panel="Before you start")
def plan(
    config: Config,
    overrides: Overrides = None,
    nodes: Annotated[Path | None, typer.Option(help="a Ray cluster-launcher file; default: this machine")] = None,
    model: Annotated[
        Path | None, typer.Option(help="a model's config.json, for the memory plan of a base model that is not on this machine")
    ] = None,
) -> None:
    """Print who would be placed where, and the memory of each device in each phase, starting nothing; or say why it can not fit.
    Takes service and job configs."""
    from skyrl_actors.commands.plan import run

    run(config, overrides or [], nodes, model)


@app.command(rich_help_panel="Before you start")
def doctor(port: Annotated[int, typer.Option(help="port of the endpoint to check")] = 8000) -> None:
    """Check versions, torch build, vLLM, memory and ports; say what to do about each failure."""
    from skyrl_actors.commands.doctor import run

    if not run(port):
        raise typer.Exit(1)


def use_ray_token(create: bool = True) -> None:
    """Ray's ports are open to the network, so a Ray that we start asks for the token in the user's home.

    Ray reads the mode once, at import; so this comes first. Commands that start no Ray create no token.
    """
    if "RAY_AUTH_MODE" in os.environ or "RAY_ADDRESS" in os.environ or not (create or RAY_TOKEN.exists()):
        return
    if not RAY_TOKEN.exists():
        RAY_TOKEN.parent.mkdir(mode=0o700, exist_ok=True)
        RAY_TOKEN.touch(mode=0o600)
        RAY_TOKEN.write_text(secrets.token_hex(32))
    os.environ["RAY_AUTH_MODE"] = "token"


def main() -> None:
    """Errors meant for people are printed without a traceback; Ctrl-C and SIGTERM clean up and end with 130."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    use_ray_token(create=sys.argv[1:2] in (["demo"], ["train"], ["serve"]))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background commands with SIGINT ignored
    try:
        code = app(standalone_mode=False)
    except SkyrlActorsError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except USAGE_ERROR as error:
        error.show()
        sys.exit(2)
    if code == INTERRUPTED:
        print("interrupted: everything that was started has been ended", file=sys.stderr)
    sys.exit(code or 0)


if __name__ == "__main__":
    main()
