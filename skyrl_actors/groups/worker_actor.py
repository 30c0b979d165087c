"""The Ray actor around one training rank. It imports torch when it is made, in its own process."""

import threading
from typing import Any

import ray

from skyrl_actors.workers.interface import WorkerSpec


class TrainWorkerActor:
    def __init__(self, spec: WorkerSpec):
        from skyrl_actors.workers.torch_worker import TorchWorker

        self.worker = TorchWorker(spec)

    def node_address(self) -> str:
        return ray.util.get_node_ip_address()

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Never returns: the caller learns of this process's death the moment it happens."""
        threading.Event().wait()

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.worker, method)(*args)
