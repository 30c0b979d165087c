"""A service of a test's own, started and stopped by the real commands."""

import json
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tinker import types

from tests.conftest import free_port, run_cli

DATUM = types.Datum(
    model_input=types.ModelInput.from_ints([1, 2, 3]),
    loss_fn_inputs={"target_tokens": [2, 3, 4]},
)


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


def status(name: str) -> dict[str, Any]:
    shown = run_cli("status", "--name", name, "--json")
    assert shown.stdout, shown.stderr
    return json.loads(shown.stdout)


def process_in(text: str) -> int:
    """Return the id of a process as `status` names it."""
    found = re.fullmatch(r"process (\d+) on .+", text)
    assert found is not None, text
    return int(found[1])


def steps(of: Any, count: int) -> list[float]:
    """Train a model of an SDK's client, and return the losses."""
    losses = []
    for _ in range(count):
        passing = of.forward_backward([DATUM], "cross_entropy")
        stepping = of.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(passing.result().metrics["loss:sum"])
        stepping.result()
    return losses
