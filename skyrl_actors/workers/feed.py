"""Weights that ranks hold in shards, on their way to engines: gathered tensor by tensor on one thread, sent bucket by bucket on another.

A bucket of gathered tensors may wait, so the next ones are gathered while one is sent, and no second copy of the weights is ever whole.
"""

import threading
from collections import deque

import torch
from torch import Tensor

from skyrl_actors.messages.weights import WeightManifest
from skyrl_actors.streams import size_of


class Feed:
    """Whoever waits for the other side gives up after `patience_s`."""

    def __init__(self, manifest: WeightManifest, limit_bytes: int, patience_s: float):
        self._manifest = manifest
        self._limit_bytes = limit_bytes
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._gathered: deque[Tensor] = deque()
        self._closed = False

    def put(self, tensor: Tensor) -> None:
        """The next tensor of the manifest. Dropped when nobody sends it: ranks gather together, so none may stop half-way."""
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
        """Bytes of these tensors, which follow those taken before. Raises RuntimeError when they do not come."""
        bucket = torch.empty(size_of(self._manifest.tensors, wanted), dtype=torch.uint8)
        start = 0
        for _ in wanted:
            tensor = self._next()
            bucket[start : start + tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
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
        """Nobody sends any more, or nobody gathers."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
