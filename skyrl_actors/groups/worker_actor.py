"""The Ray actor around one training rank. Its constructor imports torch in its own process."""

import faulthandler
import importlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import psutil

from skyrl_actors import remote
from skyrl_actors.groups.exactly_once import ExactlyOnce
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.model import LossCall
from skyrl_actors.messages.precondition import OpPrecondition
from skyrl_actors.observe import devices
from skyrl_actors.observe.log import named
from skyrl_actors.observe.process import observed, resident_bytes
from skyrl_actors.observe.spans import SPANS, Span
from skyrl_actors.workers.interface import (
    BaseModelInfo,
    PartCall,
    RankStatus,
    RankUsage,
    TrainWorker,
    WorkerSpec,
)


class TrainWorkerActor:
    """One training rank. With `spec` None, it is a standby process that can become a rank."""

    concurrency_groups: ClassVar = {"watch": 1, "status": 2, "files": 1}  # threads of each

    def __init__(self, spec: WorkerSpec | None):
        from skyrl_actors.workers import torch_worker

        self._torch = torch_worker
        self._info: BaseModelInfo | None = None
        self.spec: WorkerSpec | None = None
        self._once = ExactlyOnce(None)
        if spec is not None:
            self.become(spec)

    def __repr__(self) -> str:
        """Return the name in Ray's dashboard and logs. Ray asks for it once, after construction."""
        return "standby" if self.spec is None else f"{self.spec.role}[{self.spec.rank}]"

    def warm(self, base_folder: str, with_jax: bool) -> None:
        """Import all code that a rank needs, by loading the base model once."""
        self._torch.load_and_forget(base_folder)
        if with_jax:
            importlib.import_module("skyrl_actors.jax_workers.worker")

    def _make(self, spec: WorkerSpec) -> TrainWorker:
        if spec.strategy.type != "jax":
            return self._torch.TorchWorker(spec)
        from skyrl_actors.jax_workers.worker import JaxWorker

        return JaxWorker(spec)

    def become(self, spec: WorkerSpec) -> None:
        """Turn this process into the rank of this spec."""
        self.spec = spec
        observed().begin(repr(self), logging.WARNING)
        self.worker = self._once.worker = self._make(spec)

    def adopt(self, epoch: int) -> RankStatus:
        """Accept calls of this epoch only, and return the status of the rank.

        Verbs run one after another, so all operations of earlier epochs have ended when this runs.
        """
        applied = self._once.adopt(epoch)
        return RankStatus(
            spec=self.spec,
            info=self._info,
            applied=applied,
            pid=os.getpid(),
            log_file=os.path.realpath("/proc/self/fd/2"),
        )

    def node_address(self) -> str:
        return remote.node_address()

    @remote.typed_ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Block forever, so that the caller detects the death of this process immediately."""
        threading.Event().wait()

    @remote.typed_ray.method(concurrency_group="status")
    def usage(self) -> RankUsage:
        paths = self.worker.paths() if self.spec is not None else {}
        return RankUsage(
            rss_bytes=resident_bytes(psutil.Process()),
            devices=devices.read(devices.visible_ids(os.environ.get("CUDA_VISIBLE_DEVICES"))),
            paths=paths,
        )

    @remote.typed_ray.method(concurrency_group="status")
    def stacks(self) -> str:
        """Return the stacks of all threads, also while the thread of the verbs hangs."""
        with tempfile.TemporaryFile("w+") as stream:
            faulthandler.dump_traceback(stream, all_threads=True)
            stream.seek(0)
            return stream.read()

    @remote.typed_ray.method(concurrency_group="files")
    def write_state(self, epoch: int, folder: str, handle: int) -> None:
        self._once.fence(epoch)
        self.worker.write_state(handle, folder)

    def call(self, epoch: int, method: str, *args: Any) -> Any:
        """Run a verb of the rank itself, or a verb that only reads."""
        self._once.fence(epoch)
        result = getattr(self.worker, method)(*args)
        if method == "setup":
            self._info = result
        return result

    def delete(self, epoch: int, model_id: str) -> None:
        self._once.delete(epoch, model_id)

    def forward_backward(
        self,
        epoch: int,
        data: Sequence[Columns],
        forward_only: bool,
        parts: Sequence[tuple[str, OpPrecondition, LossCall | None]],
        rows: Sequence[tuple[int, ...]],
    ) -> list[Any]:
        """Run this rank's rows of each part. Each part is applied exactly once."""
        calls = [
            PartCall(model_id=model_id, rows=own, columns=columns, loss=loss)
            for (model_id, _, loss), own, columns in zip(parts, rows, data, strict=True)
        ]
        preconditions, began = [precondition for _, precondition, _ in parts], time.time()
        named(
            " ".join(precondition.request_id for precondition in preconditions),
            " ".join(call.model_id for call in calls),
        )
        outcomes = self._once.forward_backward(epoch, preconditions, calls, forward_only)
        if SPANS.sends:
            for precondition, call, outcome in zip(preconditions, calls, outcomes, strict=True):
                self._send_span(
                    "forward" if forward_only else "forward_backward",
                    precondition,
                    call,
                    outcome,
                    began,
                    len(calls),
                )
        return outcomes

    def _send_span(
        self,
        what: str,
        precondition: OpPrecondition,
        call: PartCall,
        outcome: Any,
        began: float,
        together: int,
    ) -> None:
        """Send a span to the trace of one part's request.

        `together` is the number of parts in the batch; all of them took the same time.
        """
        if precondition.request_id:
            outcome_text = type(outcome).__name__ if isinstance(outcome, Exception) else "ok"
            tokens = int(call.columns.lengths[list(call.rows)].sum())  # of this rank's rows
            about = {
                "outcome": outcome_text,
                "model_id": call.model_id,
                "tokens": tokens,
                "together": together,
            }
            SPANS.send(
                Span(
                    name=f"{self!r} {what}",
                    row=repr(self),
                    began=began,
                    seconds=time.time() - began,
                    request_id=precondition.request_id,
                    attributes=about,
                )
            )

    def apply(
        self, epoch: int, model_id: str, precondition: OpPrecondition, method: str, *args: Any
    ) -> Any:
        """Run a verb of a model. Each operation is applied exactly once."""
        named(precondition.request_id, model_id)
        with SPANS.sent(
            f"{self!r} {method}", repr(self), precondition.request_id, model_id=model_id
        ):
            return self._once.apply(epoch, model_id, precondition, method, *args)
