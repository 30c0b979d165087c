"""A queue of gathered weights between the thread that gathers shards and the one that sends.

Ranks gather tensor by tensor, and one rank sends bucket by bucket. About one bucket of tensors is
buffered, so the next tensors are gathered during a send. No second complete copy of the weights
exists.
"""

import threading
from collections import deque

import torch
from torch import Tensor

from skyrl_actors.messages.weights import WeightManifest
from skyrl_actors.transport.streams import size_of
from skyrl_actors.workers.state import HOST


class GatherQueue:
    """A bounded queue of tensors between two threads. Each side waits at most `patience_s`.

    Tensors and buckets are on `device`.
    """

    def __init__(
        self,
        manifest: WeightManifest,
        limit_bytes: int,
        patience_s: float,
        device: torch.device = HOST,
    ):
        self.device = device
        self._manifest = manifest
        self._limit_bytes = limit_bytes
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._gathered: deque[Tensor] = deque()
        self._closed = False

    def put(self, tensor: Tensor) -> None:
        """Add the next tensor of the manifest.

        The tensor is dropped when no thread sends: ranks gather together, so no rank can stop
        midway.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or self._has_room, self._patience_s):
                self._closed = True
            if not self._closed:
                self._gathered.append(tensor)
            self._changed.notify_all()

    @property
    def _has_room(self) -> bool:
        return not self._gathered or sum(t.nbytes for t in self._gathered) < self._limit_bytes

    def take(self, wanted: range) -> Tensor:
        """Return the bytes of these tensors, which follow those taken before.

        Raises RuntimeError when they do not arrive.
        """
        size = size_of(self._manifest.tensors, wanted)
        bucket = torch.empty(size, dtype=torch.uint8, device=self.device)
        start = 0
        for _ in wanted:
            tensor = self._next()
            bucket[start : start + tensor.nbytes].copy_(
                tensor.contiguous().view(-1).view(torch.uint8)
            )
            start += tensor.nbytes
        return bucket

    def _next(self) -> Tensor:
        with self._changed:
            self._changed.wait_for(lambda: self._gathered or self._closed, self._patience_s)
            if not self._gathered:
                raise RuntimeError(f"the ranks did not gather {self._manifest.version}")
            self._changed.notify_all()
            return self._gathered.popleft()

    def close(self) -> None:
        """End the queue, because one side has stopped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
