"""Memory of devices: what leaves a GPU, and what another process on this machine maps, of a GPU by CUDA's handles, of a host by a name.

A handle is numbers and bytes, not a pickle. Who made the memory keeps it until the others are done.
"""

from typing import Any

import torch
from torch import Tensor

Handle = tuple[Any, ...]


def shareable(num_bytes: int, device: torch.device) -> tuple[Tensor, Handle]:
    """uint8 [num_bytes] on that device, and how others find it."""
    content = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    storage: Any = content.untyped_storage()
    if device.type == "cuda":
        _, *rest = storage._share_cuda_()
        return content, (*rest, content.storage_offset())
    handle = storage._share_filename_cpu_()
    return torch.empty(0, dtype=torch.uint8).set_(storage), handle


def opened(handle: Handle, device: torch.device) -> Tensor:
    """The same memory, as uint8. The GPU is the first that this process sees: that of its maker."""
    storages: Any = torch.UntypedStorage
    if device.type == "cuda":
        *shared, start = handle
        content = torch.empty(0, dtype=torch.uint8, device="cuda:0").set_(storages._new_shared_cuda(0, *shared))
        return content[start:]
    return torch.empty(0, dtype=torch.uint8).set_(storages._new_shared_filename_cpu(*handle))


def abandoned(handle: Handle, device: torch.device) -> None:
    """Nobody will open it any more."""
    if device.type == "cuda":
        storages: Any = torch.UntypedStorage
        counter, position = handle[3:5]
        storages._release_ipc_counter(counter, position, device=device)


def given_back(device: torch.device) -> None:
    """What others have let go of is free again."""
    if device.type == "cuda":
        torch.cuda.ipc_collect()


def placed(tensor: Tensor, device: torch.device) -> Tensor:
    """On that device. What leaves a GPU goes to pinned memory, from which it returns at the speed of the bus; the copy may be
    under way when this returns."""
    if device.type == "cpu" and tensor.is_cuda:
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
    return tensor.to(device, non_blocking=True)
