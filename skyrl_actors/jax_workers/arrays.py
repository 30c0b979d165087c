"""Arrays of JAX from tensors of torch, and back."""

from typing import Any

import jax
import torch
from jax import Array
from torch import Tensor

Device = Any  # jax.Device, which the type stubs lack


def array_of(tensor: Tensor, device: Device) -> Array:
    """Return a tensor of the host as an array on this device.

    On a CPU the array shares the tensor's memory, which must not change while the array exists.
    """
    return jax.device_put(jax.dlpack.from_dlpack(tensor.detach().contiguous()), device)


def tensor_of(array: Array) -> Tensor:
    """Return an array as a tensor of the host, which must not be changed: it shares memory."""
    return torch.from_dlpack(jax.device_put(array, jax.devices("cpu")[0]))
