"""Keep the most recently used adapters on the device, and the others in host memory.

Each rank decides by itself. All ranks get their calls in the same order, so they decide alike.
Nothing depends on that: a move is not collective, and it changes the location of a vector but no
bit of it.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Literal

import torch

from skyrl_actors.transport.device_memory import settled
from skyrl_actors.workers.interface import MemoryPart
from skyrl_actors.workers.state import WholeState

PARTS: tuple[MemoryPart, ...] = ("weights", "gradients", "optimizer")
HOST = torch.device("cpu")


class AdapterPager:
    """Keep at most `limit` adapters on the device, by least recent use."""

    def __init__(self, limit: int, device: torch.device):
        self.limit = limit
        self._device = device
        self._on_device: OrderedDict[str, WholeState] = OrderedDict()  # least recently used first
        self._parts: set[MemoryPart] = set(PARTS)  # on the device in the current phase

    def is_on_device(self, model_id: str) -> bool:
        return model_id in self._on_device

    def add(self, model_id: str, state: WholeState) -> None:
        """Register a model that was created on the device, after `make_room`."""
        self._on_device[model_id] = state

    def use(self, adapters: Mapping[str, WholeState]) -> None:
        """Bring at most `limit` adapters to the device. The least recently used ones leave."""
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
        if leaving:
            settled(self._device)

    def forget(self, model_id: str) -> None:
        """Unregister a deleted model."""
        self._on_device.pop(model_id, None)

    def phase_moved(self, parts: Collection[MemoryPart], to: Literal["device", "host"]) -> None:
        """Record a phase change. Adapters that return get the parts that are on the device."""
        self._parts = self._parts | set(parts) if to == "device" else self._parts - set(parts)
