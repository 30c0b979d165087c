"""A service of a test's own, started and stopped by the real commands."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import free_port, run_cli


@contextmanager
def own_service(config: str, folder: Path, prefix: str, *more: str) -> Generator[tuple[str, str]]:
    """Yield the name and the address of a service that keeps its state in `folder`."""
    port = free_port()
    name = f"{prefix}-{port}"
    options = (f"name={name}", f"http.port={port}", f"checkpoint_dir={folder / 'checkpoints'}")
    options += (f"journal.folder={folder / 'journal'}", *more)
    started = run_cli("serve", config, *options, timeout=600)
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        yield name, f"http://127.0.0.1:{port}"
    finally:
        stopped = run_cli("stop", "--name", name)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
