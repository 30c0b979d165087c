"""Arrays of JAX from tensors of torch."""

from typing import Any

import jax
from jax import Array
from torch import Tensor

Device = Any  # jax.Device, which the type stubs lack


def array_of(tensor: Tensor, device: Device) -> Array:
    """Return a tensor of the host as an array on this device.

    On a CPU the array shares the tensor's memory, which must not change while the array exists.
    """
    return jax.device_put(jax.dlpack.from_dlpack(tensor.detach().contiguous()), device)
