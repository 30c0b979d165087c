"""Send SIGKILL to processes of a service on this machine, which are found by their titles."""

import json
import os
import random
import shutil
import signal

import psutil

from skyrl_actors.commands.serve import state_file
from skyrl_actors.config.transfers import SHARED_MEMORY

TITLES: dict[str, str | tuple[str, ...]] = {
    "rank": "ray::TrainWorkerActor",
    "engine actor": "ray::EngineActor",
    "vLLM process": "VLLM::EngineCore",
    "controller": "ray::ControllerActor",
    "ingress replica": "ray::ServeReplica",
    "Serve proxy": ("haproxy", "ray::HAProxyManager", "ray::ProxyActor"),
}
KINDS = (
    "rank",
    "group",
    "engine actor",
    "vLLM process",
    "controller",
    "ingress replica",
    "Serve proxy",
)


def family(name: str) -> list[psutil.Process]:
    """Return all processes of the service: the daemons of its Ray session and their children."""
    marks = json.loads(state_file(name).read_text())["marks"]
    daemons = [
        p
        for p in psutil.process_iter(["cmdline"])
        if any(m in part for m in marks for part in p.info["cmdline"] or ())
    ]
    found = {p.pid: p for daemon in daemons for p in (daemon, *_children(daemon))}
    found.pop(os.getpid(), None)
    return list(found.values())


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def processes(name: str, kind: str) -> list[psutil.Process]:
    titles = TITLES["rank" if kind == "group" else kind]
    found = []
    for process in family(name):
        command = (_command(process) or [""])[0]
        if command.startswith(titles) or (kind == "Serve proxy" and command.endswith("/haproxy")):
            found.append(process)
    return found


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def kill(name: str, kind: str, choice: random.Random) -> list[int]:
    """Kill one process of that kind, or all ranks for "group". Return the process ids."""
    found = processes(name, kind)
    chosen = found if kind == "group" else choice.sample(found, min(1, len(found)))
    return [process.pid for process in chosen if _killed(process)]


def power_cut(name: str) -> int:
    """Kill every process of the service at once, and remove its shared memory.

    Returns the number of processes.
    """
    watchers_first = sorted(
        family(name), key=lambda p: "haproxy_launcher" not in " ".join(_command(p))
    )
    count = sum(_killed(process) for process in watchers_first)
    shutil.rmtree(SHARED_MEMORY / name, ignore_errors=True)
    return count


def _killed(process: psutil.Process) -> bool:
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return False
    return True
