"""Training ranks as plain processes, without Ray. Each rank runs the same function."""

import importlib
import multiprocessing as mp
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

# Enough for a first run beside a service that starts on the same two cores.
TIMEOUT_S = 150.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Ranks:
    """Idle processes of one process group, because an engine can keep its group permanently."""

    def __init__(self, count: int, timeout_s: float = TIMEOUT_S):
        self._count = count
        self.timeout_s = timeout_s
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._start()

    def _start(self) -> None:
        self._port = free_port()
        context = mp.get_context("spawn")
        for _ in range(self._count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run function(rank, world_size, port, *args) on each rank; return the results in order.

        Ranks that did not all answer are ended, because the others can wait for them forever. The
        next run starts new ones.
        """
        if not self._processes:
            self._start()
        for rank, pipe in enumerate(self._pipes):
            pipe.send(
                (
                    function.__module__,
                    function.__name__,
                    (rank, len(self._pipes), self._port, *args),
                )
            )
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + self.timeout_s
        while len(answers) < len(self._pipes) and time.monotonic() < deadline:
            for pipe in wait(
                [p for i, p in enumerate(self._pipes) if i not in answers], timeout=1.0
            ):
                answers[self._pipes.index(pipe)] = pipe.recv()  # type: ignore[arg-type, union-attr]
            if any(not good for good, _ in answers.values()):
                # The other ranks can wait for the failed one forever.
                deadline = min(deadline, time.monotonic() + 2.0)
        if len(answers) < self._count:
            self.close()
        missing = (False, "did not answer")
        answered = [answers.get(i, missing) for i in range(self._count)]
        failed = [f"rank {i}: {value}" for i, (good, value) in enumerate(answered) if not good]
        assert not failed, "\n".join(failed)
        return [value for _, value in answered]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []


def _serve(pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    # Torch's manager of shared memory must start while a fork of this process is still small.
    storage: Any = torch.zeros(1).untyped_storage()
    storage._share_filename_cpu_()
    while True:
        try:
            module, name, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = True, getattr(importlib.import_module(module), name)(*args)
        except Exception:  # noqa: BLE001  raised again by the caller
            answer = False, traceback.format_exc()
        pipe.send(answer)
