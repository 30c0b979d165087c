"""SIGKILL for the processes of a service on this machine, found by what they call themselves."""

import random
import signal
from collections.abc import Callable

import psutil

TITLES = {
    "rank": "ray::TrainWorkerActor",
    "engine actor": "ray::EngineActor",
    "vLLM process": "VLLM::EngineCore",
    "controller": "ray::ControllerActor",
    "ingress replica": "ray::ServeReplica",
    "Serve proxy": "haproxy",
}
KINDS = ("rank", "group", "engine actor", "vLLM process", "controller", "ingress replica", "Serve proxy")


def processes(kind: str) -> list[psutil.Process]:
    title = TITLES["rank" if kind == "group" else kind]
    found = []
    for process in psutil.process_iter(["cmdline", "name"]):
        command = process.info["cmdline"] or [""]
        if command[0].startswith(title) or (kind == "Serve proxy" and command[0].endswith("/haproxy")):
            found.append(process)
    return found


def kill(kind: str, choice: random.Random) -> list[int]:
    """One process of that kind (all ranks for "group"); returns the process ids."""
    found = processes(kind)
    chosen = found if kind == "group" else choice.sample(found, min(1, len(found)))
    return [process.pid for process in chosen if _killed(process)]


def kill_all(is_ours: Callable[[psutil.Process], bool]) -> int:
    """As when the power goes: every process that is ours, at once."""
    return sum(_killed(process) for process in psutil.process_iter() if is_ours(process))


def _killed(process: psutil.Process) -> bool:
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return False
    return True
