"""Refuse what conflicts with a service that runs: a Ray cluster has one service and one address."""

import socket
from pathlib import Path
from typing import Any, cast

from ray.serve import context

from skyrl_actors.api.client import find_controller
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.shard_configs import shard_configs
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.storage.private_folders import private_folder, run_folder

ONE = (
    "a Ray cluster has one service: stop the other one, serve both models with one service "
    "(base_models), or use another Ray cluster, for example in a container"
)


def state_file(name: str) -> Path:
    """Return the file in which `serve` leaves the data that `stop` needs."""
    return private_folder(run_folder() / "services") / f"{name}.json"


def started_services() -> list[str]:
    """Return the services that `serve` started on this machine and that were not stopped."""
    return sorted(file.stem for file in state_file("").parent.glob("*.json"))


def stop_command(name: str) -> str:
    """Return the command that stops a service."""
    return "skyrl-actors stop" + ("" if name == "skyrl-actors" else f" --name {name}")


def refuse_shard(name: str) -> None:
    """Raise ConfigError for the name of one shard: commands act on whole services."""
    service, dot, number = name.partition(".")
    if dot:
        raise ConfigError(
            f"{name!r} is shard {number} of {service!r}, and commands act on a whole service; use "
            f"--name {service}"
        )


def check_port(config: ClusterConfig) -> None:
    """Raise ConfigError if another program has the address, or it is one of IPv6."""
    if ":" in config.http.host:
        raise ConfigError(
            f"http.host is {config.http.host}: the endpoint listens on IPv4 only; use 0.0.0.0 "
            "or an IPv4 address of this machine, and a proxy for clients with IPv6"
        )
    address = f"{config.http.host}:{config.http.port}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.http.host, config.http.port))
        except OSError as error:
            mine = started_services()
            if config.name in mine:
                _refuse(config.name)
            others = ", ".join(stop_command(name) for name in mine)
            hint = (
                f"if a service of this machine has it, stop that: {others}; {ONE}"
                if mine
                else "stop the program that uses it, or choose another port with http.port=…"
            )
            raise ConfigError(f"{address} cannot be bound ({error.strerror}); {hint}") from None


def _refuse(name: str) -> None:
    raise ConfigError(f"a service named {name!r} is already running; stop it: {stop_command(name)}")


def refuse_second(config: ClusterConfig) -> None:
    """Raise ConfigError if a service of this name runs."""
    for shard in shard_configs(config):
        try:
            find_controller(shard.name)
        except ValueError:
            continue
        _refuse(config.name)


def refuse_other_edge(config: ClusterConfig) -> None:
    """Refuse an address or application that conflicts with the cluster's Ray Serve.

    A Ray cluster has one Ray Serve, with one address and one application at its root.
    """
    # Ray exports its client under a private name only.
    client = cast(Any, context)._get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return
    there, wanted = client.http_config, config.http
    if (there.host, there.port) != (wanted.host, wanted.port):
        raise ConfigError(
            f"Ray Serve of this cluster listens on {there.host}:{there.port}, not on "
            f"{wanted.host}:{wanted.port}; {ONE}"
        )
    details: dict[str, Any] = client.get_serve_details()
    if wanted.nodes == "all" and details.get("proxy_location") == "HeadOnly":
        raise ConfigError(
            "http.nodes=all, but Ray Serve of this cluster runs with proxy_location HeadOnly, "
            "which only its restart changes: serve shutdown -y, or leave http.nodes out"
        )
    applications: dict[str, dict[str, Any]] = details.get("applications", {})
    for name, application in applications.items():
        if application.get("route_prefix") == "/" and name != config.name:
            raise ConfigError(
                f"application {name!r} is at the root of this cluster's Ray Serve; {ONE}"
            )
