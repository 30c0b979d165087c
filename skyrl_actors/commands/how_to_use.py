"""Say how to use a service that has started."""

import sys
from pathlib import Path

from skyrl_actors.commands import cluster
from skyrl_actors.commands.terminal import console
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.http import EVERY_ADDRESS
from skyrl_actors.storage.files import size_of


def local_url(config: ClusterConfig) -> str:
    """Return the base URL of the service on this machine."""
    return f"http://{config.http.host}:{config.http.port}"


def say_how_to_use(config: ClusterConfig) -> None:
    """Print what a user of a new service needs."""
    http = config.http
    if http.public_url is None and http.host == EVERY_ADDRESS:
        own = f"http://{cluster.node_address()}:{http.port}"
        config = config.model_copy(update={"http": http.model_copy(update={"public_url": own})})
    for line in usage(config, cluster.dashboard_address()):
        console.print(line, soft_wrap=True)


def usage(config: ClusterConfig, dashboard: str) -> list[str]:
    """Return what a user of a new service needs: addresses, folders and commands to paste."""
    key = "<one of your keys>" if config.http.api_keys else "tml-local"
    name = "" if config.name == "skyrl-actors" else f" --name {config.name}"
    base = (config.http.public_url or local_url(config)).rstrip("/")
    page = [] if config.http.console is None else [f"console    {base}/"]
    if config.http.nodes == "all":
        page.append("endpoint   on each node with an ingress process: put a load balancer in front")
    return [
        f"\nserving {', '.join(config.served())} at [bold]{base}[/bold]",
        f"  export TINKER_BASE_URL={base}\n  export TINKER_API_KEY={key}",
        *page,
        f"OpenAI     {base}/v1",
        f"dashboard  http://{dashboard}  (needs the token in ~/.ray/auth_token)",
        f"journal    {_kept(config.journal.folder)}",
        f"weights    {_kept(config.checkpoint_dir)}",
        f"jobs       RAY_AUTH_MODE=token ray job submit --working-dir . -- {sys.executable} "
        "-m skyrl_actors train configs/jobs/ppo_tiny.yaml run.folder=$PWD/runs",
        f"status     skyrl-actors status{name}",
        f"stop       skyrl-actors stop{name}",
    ]


def _kept(folder: Path) -> str:
    """Return the absolute path of a folder and its size."""
    whole = folder.expanduser().absolute()
    return f"{whole} ({size_of(whole) / 2**20:,.1f} MiB)"
