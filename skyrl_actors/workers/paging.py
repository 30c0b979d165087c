"""Keep the most recently used adapters on the device, and the others in host memory.

Each rank decides by itself. All ranks get their calls in the same order, so they decide alike.
Nothing depends on that: a move is not collective, and it changes the location of a vector but no
bit of it.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from skyrl_actors.transport.device_memory import settled
from skyrl_actors.workers.interface import MemoryPart
from skyrl_actors.workers.state import WholeState

PARTS: tuple[MemoryPart, ...] = ("weights", "gradients", "optimizer")
HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Adapter:
    """The state of an adapter, and the rank by which its memory grows."""

    state: WholeState
    rank: int


class AdapterPager:
    """Keep adapters on the device whose ranks add up to at most `room`, by least recent use."""

    def __init__(self, room: int, device: torch.device):
        self.room = room
        self._device = device
        self._on_device: OrderedDict[str, Adapter] = OrderedDict()  # least recently used first
        self._parts: set[MemoryPart] = set(PARTS)  # on the device in the current phase

    def is_on_device(self, model_id: str) -> bool:
        return model_id in self._on_device

    def add(self, model_id: str, adapter: Adapter) -> None:
        """Register a model that was created on the device, after `make_room`."""
        self._on_device[model_id] = adapter

    def use(self, adapters: Mapping[str, Adapter]) -> None:
        """Bring adapters that fit together to the device. The least recently used ones leave."""
        absent = [model_id for model_id in adapters if model_id not in self._on_device]
        self.make_room(sum(adapters[model_id].rank for model_id in absent), keep=adapters)
        for model_id in absent:
            self._on_device[model_id] = adapters[model_id]
            for part in PARTS:
                if part in self._parts:
                    adapters[model_id].state.move(part, self._device)
        for model_id in adapters:
            self._on_device.move_to_end(model_id)

    def make_room(self, rank: int, keep: Collection[str] = ()) -> None:
        """Move adapters to host memory until those of `rank` in sum fit too."""
        excess = sum(adapter.rank for adapter in self._on_device.values()) + rank - self.room
        leaving: list[WholeState] = []
        for model_id in [name for name in self._on_device if name not in keep]:
            if excess <= 0:
                break
            adapter = self._on_device.pop(model_id)
            excess -= adapter.rank
            leaving.append(adapter.state)
        for state in leaving:
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
