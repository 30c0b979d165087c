"""Arrays of JAX from tensors of torch, and back, on the devices of a rank."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import torch
from jax import Array
from torch import Tensor

Device = Any  # jax.Device, which the type stubs lack
FSDP, TENSOR = "fsdp", "tensor"  # the axes of a mesh
Axes = tuple[str | None, ...]  # the axis of a mesh that divides each axis of an array


class Devices(Protocol):
    """Where the arrays of a network lie: on one device, or over the ranks of a mesh."""

    @property
    def alone(self) -> bool:
        """Whether all arrays are on one device."""
        ...

    @property
    def keeps_programs(self) -> bool:
        """Whether a program that was read from a file computes as the one that was compiled."""
        ...

    def put(self, tensor: Tensor, axes: Axes = ()) -> Array:
        """Return a tensor of the host as an array, divided by these axes of the mesh."""
        ...

    def stacked(self, read: Sequence[Callable[[], Tensor]], axes: Axes) -> Array:
        """Return these tensors of the layers as one array, with an axis of layers in front."""
        ...

    def given(self, tree: Any) -> Any:
        """Return arrays of numpy as inputs of a program, whole on each device."""
        ...

    def spread(self, x: Array) -> Array:
        """Divide hidden states [T, H] inside a program."""
        ...

    def jit(self, function: Callable[..., Any], keeps: bool) -> Any:
        """Return `jax.jit` of a function whose results are whole on each device.

        With `keeps`, its second result is what only another program reads.
        """
        ...


class OneDevice:
    """All arrays on one device."""

    def __init__(self, device: Device):
        self.device = device

    def __repr__(self) -> str:
        """Return what a program depends on."""
        return f"{self.device}"

    alone = keeps_programs = True

    def put(self, tensor: Tensor, axes: Axes = ()) -> Array:
        """On a CPU the array shares the tensor's memory, which must not change from now on."""
        del axes
        return jax.device_put(jax.dlpack.from_dlpack(tensor.detach().contiguous()), self.device)

    def stacked(self, read: Sequence[Callable[[], Tensor]], axes: Axes) -> Array:
        return self.put(torch.stack([each() for each in read]), axes)

    def given(self, tree: Any) -> Any:
        return tree  # the program takes arrays of numpy

    def spread(self, x: Array) -> Array:
        return x

    def jit(self, function: Callable[..., Any], keeps: bool) -> Any:
        del keeps
        return jax.jit(function)


def tensor_of(array: Array) -> Tensor:
    """Return an array as a tensor of the host, which must not be changed: it shares memory.

    An array of a mesh is whole on each device.
    """
    own = array.addressable_data(0)
    return torch.from_dlpack(jax.device_put(own, jax.local_devices(backend="cpu")[0]))
