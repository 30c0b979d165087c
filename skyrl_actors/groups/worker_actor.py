"""The Ray actor around one training rank. It imports torch when it is made, in its own process."""

import faulthandler
import logging
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

import psutil
import ray

from skyrl_actors.groups.exactly_once import ExactlyOnce
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.model import LossCall
from skyrl_actors.messages.turn import Turn
from skyrl_actors.observe.log import named
from skyrl_actors.observe.process import observed
from skyrl_actors.observe.spans import SPANS, Span
from skyrl_actors.workers.interface import BaseModelInfo, PartCall, RankStatus, WorkerSpec


class TrainWorkerActor:
    """`spec` None: a process that waits to become a rank."""

    def __init__(self, spec: WorkerSpec | None):
        from skyrl_actors.workers.torch_worker import TorchWorker

        self._make = TorchWorker
        self._info: BaseModelInfo | None = None
        self.spec: WorkerSpec | None = None
        self._once = ExactlyOnce(None)
        if spec is not None:
            self.become(spec)

    def __repr__(self) -> str:
        """In Ray's dashboard and before its lines of the log; asked for once, when it is made."""
        return "standby" if self.spec is None else f"{self.spec.role}[{self.spec.rank}]"

    def warm(self, base_folder: str) -> None:
        """Load all code that a rank needs, by loading the base model once."""
        from skyrl_actors.workers.torch_worker import load_and_forget

        load_and_forget(base_folder)

    def become(self, spec: WorkerSpec) -> None:
        self.spec = spec
        observed().begin(repr(self), logging.WARNING)
        self.worker = self._once.worker = self._make(spec)

    def adopt(self, epoch: int) -> RankStatus:
        """What an earlier epoch began has ended when this runs: verbs run one after another."""
        applied = self._once.adopt(epoch)
        return RankStatus(self.spec, self._info, applied, os.getpid(), os.path.realpath("/proc/self/fd/2"))

    def node_address(self) -> str:
        return ray.util.get_node_ip_address()

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Never returns: the caller learns of this process's death the moment it happens."""
        threading.Event().wait()

    @ray.method(concurrency_group="vitals")
    def rss_bytes(self) -> int:
        return psutil.Process().memory_info().rss

    @ray.method(concurrency_group="vitals")
    def stacks(self) -> str:
        """Where every thread of this process is, while the verbs' thread hangs."""
        with tempfile.TemporaryFile("w+") as stream:
            faulthandler.dump_traceback(stream, all_threads=True)
            stream.seek(0)
            return stream.read()

    @ray.method(concurrency_group="files")
    def write_state(self, epoch: int, handle: int, folder: str) -> None:
        self._once.fence(epoch)
        self.worker.write_state(handle, folder)

    def call(self, epoch: int, method: str, *args: Any) -> Any:
        """A verb of the rank itself, or one that only reads."""
        self._once.fence(epoch)
        result = getattr(self.worker, method)(*args)
        if method == "setup":
            self._info = result
        return result

    def delete(self, epoch: int, model_id: str) -> None:
        self._once.delete(epoch, model_id)

    def forward_backward(
        self, epoch: int, data: Sequence[Columns], parts: Sequence[tuple[str, Turn, tuple[int, ...], LossCall | None]],
        forward_only: bool,
    ) -> list[Any]:  # fmt: skip
        """Of several models, each applied once for its turn."""
        calls = [PartCall(model_id, rows, columns, loss) for (model_id, _, rows, loss), columns in zip(parts, data, strict=True)]
        turns, began = [turn for _, turn, _, _ in parts], time.time()
        named(" ".join(turn.request_id for turn in turns), " ".join(call.model_id for call in calls))
        outcomes = self._once.forward_backward(epoch, turns, calls, forward_only)
        if SPANS.sends:
            for turn, call, outcome in zip(turns, calls, outcomes, strict=True):
                self._sent("forward" if forward_only else "forward_backward", turn, call, outcome, began, len(calls))
        return outcomes

    def _sent(self, what: str, turn: Turn, call: PartCall, outcome: Any, began: float, together: int) -> None:
        """To the trace of one part's request; `together`: parts that were computed at once, and took as long."""
        if turn.request_id:
            said = type(outcome).__name__ if isinstance(outcome, Exception) else "ok"
            tokens = int(call.columns.lengths[list(call.rows)].sum())  # of this rank's rows
            about = {"outcome": said, "model_id": call.model_id, "tokens": tokens, "together": together}
            SPANS.send(Span(f"{self!r} {what}", repr(self), began, time.time() - began, turn.request_id, about))

    def apply(self, epoch: int, model_id: str, turn: Turn, method: str, *args: Any) -> Any:
        """A verb of a model, applied once for each turn."""
        named(turn.request_id, model_id)
        with SPANS.sent(f"{self!r} {method}", repr(self), turn.request_id, model_id=model_id):
            return self._once.apply(epoch, model_id, turn, method, *args)
