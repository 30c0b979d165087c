"""The Ray actor around one training rank. It imports torch when it is made, in its own process.

It keeps what exactly-once needs: the epoch of its controller, and for every model the last operation that was applied
with its result. An operation that is asked for again gets that result; one that broke off leaves the model torn, and a
torn model answers nothing until it is made anew.
"""

import faulthandler
import os
import tempfile
import threading
from dataclasses import dataclass
from typing import Any

import psutil
import ray

from skyrl_actors.messages.errors import InternalError, SkyrlActorsError, StateLost, UserError
from skyrl_actors.workers.interface import BaseModelInfo, RankStatus, WorkerSpec

MAKE_ANEW = ("create_model", "restore_state")
CLEAN_FAILURES = ("optim_step",)  # a refusal that leaves the same state on every rank: gradients dropped


@dataclass(frozen=True, slots=True)
class Applied:
    number: int
    result: Any
    error: SkyrlActorsError | None = None


class TrainWorkerActor:
    def __init__(self, spec: WorkerSpec):
        from skyrl_actors.workers.torch_worker import TorchWorker

        self.worker = TorchWorker(spec)
        self._info: BaseModelInfo | None = None
        self._epoch = 0
        self._applied: dict[str, Applied] = {}

    def adopt(self, epoch: int) -> RankStatus:
        """From now on only this epoch's calls are served; what an earlier one began has ended when this runs."""
        self._fence(epoch)
        self._epoch = epoch
        applied = {model_id: applied.number for model_id, applied in self._applied.items()}
        return RankStatus(self.worker.spec, self._info, applied, os.getpid(), os.path.realpath("/proc/self/fd/2"))

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
        self._fence(epoch)
        self.worker.write_state(handle, folder)

    def call(self, epoch: int, method: str, *args: Any) -> Any:
        """A verb of the rank itself, or one that only reads."""
        self._fence(epoch)
        result = getattr(self.worker, method)(*args)
        if method == "setup":
            self._info = result
        return result

    def delete(self, epoch: int, model_id: str) -> None:
        self._fence(epoch)
        self._applied.pop(model_id, None)
        self.worker.delete_model(model_id)

    def apply(self, epoch: int, model_id: str, number: int | None, method: str, *args: Any) -> Any:
        """A verb of a model. `number` None: it leaves the state as it is."""
        self._fence(epoch)
        known = self._applied.get(model_id)
        if number is None:
            self._whole(model_id, known)
            return getattr(self.worker, method)(*args)
        if known is not None and known.number == number and method != "restore_state":
            if known.error is not None:
                raise known.error
            return known.result
        if method not in MAKE_ANEW and self._whole(model_id, known).number > number:
            raise InternalError(f"operation {number} of {model_id} comes after {known and known.number}")
        return self._apply(model_id, number, method, args)

    def _apply(self, model_id: str, number: int, method: str, args: tuple[Any, ...]) -> Any:
        self._applied.pop(model_id, None)  # torn, until it is done
        try:
            result = getattr(self.worker, method)(*args)
        except UserError as error:
            if method in CLEAN_FAILURES:
                self._applied[model_id] = Applied(number, None, error)
            raise
        self._applied[model_id] = Applied(number, result)
        return result

    def _whole(self, model_id: str, known: Applied | None) -> Applied:
        if known is None:
            raise StateLost(f"rank {self.worker.spec.rank} does not hold a whole {model_id}")
        return known

    def _fence(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise InternalError(f"epoch {epoch} is over: a newer controller ({self._epoch}) has taken this rank")
