"""`doctor`: checks of this machine, each with a remedy."""

import importlib.metadata
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from skyrl_actors import torchvision_cpu
from skyrl_actors.commands import cluster
from skyrl_actors.commands.serve import read_status
from skyrl_actors.commands.terminal import console
from skyrl_actors.messages.errors import SkyrlActorsError
from skyrl_actors.messages.narrowing import is_object

NEEDED_GIB = 6.0
SHM_GIB = 0.5
PROJECT = Path(__file__).parent.parent.parent
WANTS_TOKEN = "Unauthorized: Missing authentication token"  # Ray's answer without its token


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check. `remedy` is printed if it is not `good`."""

    good: bool
    what: str
    remedy: str = ""


def run(port: int, service: str) -> bool:
    """Print every finding. Return True if all checks pass.

    If the service runs here, this includes what its ranks compute with.
    """
    findings = [
        finding for check in (_python, _pins, _torch, _vllm, _memory) for finding in check()
    ]
    findings += list(_ports((port, 8265)))
    findings += list(computing_with(service))
    for finding in findings:
        mark = "[green]ok[/green]  " if finding.good else "[red]FAIL[/red]"
        console.print(
            f"{mark} {finding.what}" + ("" if finding.good else f"\n       → {finding.remedy}")
        )
    return all(finding.good for finding in findings)


def _python() -> Iterator[Finding]:
    version = sys.version_info
    text = f"Python {version.major}.{version.minor}.{version.micro}"
    yield Finding(
        (3, 11) <= version[:2] <= (3, 12),
        text,
        "use Python 3.11 or 3.12 for the virtual environment",
    )


def _pins() -> Iterator[Finding]:
    """Compare the exact pins of pyproject.toml with the installed versions."""
    for requirement in importlib.metadata.requires("skyrl-actors") or []:
        match = re.match(r"([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?\s*==\s*([^;\s]+)(.*)", requirement)
        if not match:
            continue
        name, wanted, marker = match.groups()
        optional = "extra ==" in marker
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if not optional:
                yield Finding(False, f"{name} is not installed", f"pip install {name}=={wanted}")
            continue
        yield Finding(
            found.split("+")[0] == wanted,
            f"{name} {found} (pinned {wanted})",
            f"pip install '{name}=={wanted}'",
        )


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding(
            False,
            f"torch cannot be imported: {error}",
            "run make setup, or install torch before the other packages",
        )
        return
    has_gpu = shutil.which("nvidia-smi") is not None
    build = torch.version.cuda or "cpu"
    yield Finding(
        not has_gpu or torch.cuda.is_available(),
        f"torch build {build}; GPU visible: {torch.cuda.is_available()}",
        "this machine has an NVIDIA GPU but torch cannot use it; "
        "install the CUDA build and '.[gpu]'",
    )
    for name in ("torchaudio", "torchcodec"):
        if build == "cpu" and _installed(name):
            yield Finding(
                False,
                f"{name} is installed together with a CPU build of torch",
                f"pip uninstall -y {name}  (its CUDA build breaks imports)",
            )
    if build == "cpu" and _installed("torchvision"):
        hook = Path(sysconfig.get_path("purelib")) / torchvision_cpu.HOOK
        yield Finding(
            hook.is_file(),
            "torchvision imports beside a CPU build of torch"
            if hook.is_file()
            else "torchvision does not import beside a CPU build of torch",
            f"{sys.executable} -c "
            "'from skyrl_actors import torchvision_cpu; torchvision_cpu.write_hook()'",
        )


def _vllm() -> Iterator[Finding]:
    command = [sys.executable, "-c", "import vllm; print(vllm.__version__)"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    remedy = (
        "pip install '.[cpu]' (or '.[gpu]'); last line: "
        + (done.stderr.strip().splitlines() or ["-"])[-1]
    )
    yield Finding(done.returncode == 0, f"vLLM imports: {done.stdout.strip() or 'no'}", remedy)


def _memory() -> Iterator[Finding]:
    free = psutil.virtual_memory().available / 2**30
    yield Finding(
        free >= NEEDED_GIB,
        f"{free:.1f} GiB of memory free",
        f"the tiny service needs {NEEDED_GIB:.0f} GiB; stop other programs",
    )
    shm = shutil.disk_usage("/dev/shm").free / 2**30
    yield Finding(
        shm >= SHM_GIB,
        f"{shm:.1f} GiB free in /dev/shm",
        "mount a larger /dev/shm (docker run --shm-size=4g), "
        "or set transfer.folder to another folder",
    )


def _ports(ports: tuple[int, ...]) -> Iterator[Finding]:
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                yield Finding(True, f"port {port} is free")
            except OSError:
                if known := _known(port):
                    yield Finding(True, f"port {port}: {known}")
                    continue
                owner = _safe(lambda port=port: _owner(port))
                yield Finding(
                    False,
                    f"port {port} is taken{owner}",
                    "stop that program (skyrl-actors stop), "
                    "or choose another port with http.port=…",
                )


def computing_with(service: str) -> Iterator[Finding]:
    """Report the paths that each group of a running service really uses, and its transfer."""
    if cluster.ray_address() is None:
        return  # no cluster runs here
    try:
        status = read_status(service)
    except SkyrlActorsError:
        return  # no service of this name
    for role, group in status.get("groups", {}).items():
        paths: dict[str, str] = group["paths"]
        used = ", ".join(f"{part}: {path}" for part, path in paths.items())
        yield Finding(
            bool(paths),
            f"{role} of {service} ({group['ranks']} ranks) computes with {used or '?'}",
            f"its ranks do not answer: {group['state']}",
        )
    if "transfer" in status:
        yield Finding(True, f"weights of {service} reach engines by {status['transfer']}")


def _known(port: int) -> str | None:
    """Describe the program on the port if it is a service of skyrl-actors or Ray's dashboard."""
    for path, words in (
        ("healthz", "a service runs there"),
        ("api/version", "Ray's dashboard runs there"),
    ):
        try:
            answer = httpx.get(f"http://127.0.0.1:{port}/{path}", timeout=1, trust_env=False)
            if path == "api/version" and answer.text.startswith(WANTS_TOKEN):
                return words
            found = answer.json()
        except (httpx.HTTPError, ValueError):
            continue
        if path == "healthz" and is_object(found) and found.get("status") in ("ok", "unavailable"):
            return words + (
                "" if found["status"] == "ok" else f" but is not ready: {found.get('reason')}"
            )
        if path == "api/version" and is_object(found) and "ray_version" in found:
            return words
    return None


def _owner(port: int) -> str:
    for connection in psutil.net_connections("tcp"):
        if (
            connection.laddr
            and connection.laddr.port == port
            and connection.status == psutil.CONN_LISTEN
            and connection.pid
        ):
            return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""


def _safe(read: Callable[[], str]) -> str:
    try:
        return read()
    except psutil.Error:
        return ""


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
