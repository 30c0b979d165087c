"""Which adapters are on the device: the most recently used. The others are in host memory, and return when they are used.

Each rank decides for itself. Its calls come in the same order as those of the other ranks, so all decide alike, and
nothing depends on it if they do not: a move is no collective, and it changes where a vector is, not a bit of it.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Literal

import torch

from skyrl_actors.workers.flat import FlatState
from skyrl_actors.workers.interface import Part

PARTS: tuple[Part, ...] = ("weights", "gradients", "optimizer")
HOST = torch.device("cpu")


class AdapterPager:
    """Keeps at most `limit` adapters on the device, by least recent use."""

    def __init__(self, limit: int, device: torch.device):
        self.limit = limit
        self._device = device
        self._on_device: OrderedDict[str, FlatState] = OrderedDict()  # least recently used first
        self._parts: set[Part] = set(PARTS)  # that the present phase has on the device

    def is_on_device(self, model_id: str) -> bool:
        return model_id in self._on_device

    def add(self, model_id: str, state: FlatState) -> None:
        """A model that was just made on the device, behind `make_room`."""
        self._on_device[model_id] = state

    def use(self, adapters: Mapping[str, FlatState]) -> None:
        """Have these on the device, `limit` at most; adapters that were used least recently make room."""
        absent = [model_id for model_id in adapters if model_id not in self._on_device]
        self.make_room(len(absent), keep=adapters)
        for model_id in absent:
            self._on_device[model_id] = adapters[model_id]
            for part in PARTS:
                if part in self._parts:
                    adapters[model_id].move(part, self._device)
        for model_id in adapters:
            self._on_device.move_to_end(model_id)

    def make_room(self, count: int = 1, keep: Collection[str] = ()) -> None:
        """Move adapters to host memory until `count` more fit."""
        idle = [model_id for model_id in self._on_device if model_id not in keep]
        leaving = idle[: max(0, len(self._on_device) + count - self.limit)]
        for model_id in leaving:
            state = self._on_device.pop(model_id)
            state.free_empty_gradients()
            for part in PARTS:
                state.move(part, HOST)
        if leaving and self._device.type == "cuda":
            torch.cuda.synchronize()  # a copy to pinned memory may be under way, and the host may read it next

    def forget(self, model_id: str) -> None:
        """The model is deleted."""
        self._on_device.pop(model_id, None)

    def phase_moved(self, parts: Collection[Part], to: Literal["device", "host"]) -> None:
        """A phase changed. Adapters that come to the device get what it has there."""
        self._parts = self._parts | set(parts) if to == "device" else self._parts - set(parts)
