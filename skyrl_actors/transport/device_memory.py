"""Share device memory with other processes of a machine, and copy tensors off a GPU.

GPU memory is shared by CUDA handles, host memory by name. A handle consists of numbers and bytes,
without a pickle. The process that allocates the memory keeps it until the others are done.
"""

from typing import Any

import torch
from torch import Tensor

Handle = tuple[Any, ...]


def shareable(num_bytes: int, device: torch.device) -> tuple[Tensor, Handle]:
    """Allocate uint8 [num_bytes] on the device, with a handle for other processes."""
    content = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    storage: Any = content.untyped_storage()
    if device.type == "cuda":
        _, *rest = storage._share_cuda_()
        return content, (*rest, content.storage_offset())
    handle = storage._share_filename_cpu_()
    return torch.empty(0, dtype=torch.uint8).set_(storage), handle


def opened(handle: Handle, device: torch.device) -> Tensor:
    """Map the memory of a handle as uint8.

    The GPU is the first one that this process sees. It must be the GPU of the allocating process.
    """
    storages: Any = torch.UntypedStorage
    if device.type == "cuda":
        *shared, start = handle
        content = torch.empty(0, dtype=torch.uint8, device="cuda:0").set_(
            storages._new_shared_cuda(0, *shared)
        )
        return content[start:]
    return torch.empty(0, dtype=torch.uint8).set_(storages._new_shared_filename_cpu(*handle))


def abandoned(handle: Handle, device: torch.device) -> None:
    """Drop a handle that no process will open."""
    if device.type == "cuda":
        storages: Any = torch.UntypedStorage
        counter, position = handle[3:5]
        storages._release_ipc_counter(counter, position, device=device)


def given_back(device: torch.device) -> None:
    """Free CUDA memory that other processes have released."""
    if device.type == "cuda":
        torch.cuda.ipc_collect()


def settled(device: torch.device) -> None:
    """Wait for the device's copies. The host may then read what was copied to it."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def free_unused(device: torch.device) -> None:
    """Give memory that no tensor uses back to the device, for other processes."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def allocated(device: torch.device) -> int:
    """Return the bytes of this process's tensors on the device; 0 for the host."""
    return 0 if device.type == "cpu" else int(torch.get_device_module(device).memory_allocated())


def placed(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy the tensor to the device; the copy may still run when this returns.

    A device's tensor is copied to pinned memory, so that its way back has the bus's full speed.
    """
    if device.type == "cpu" and tensor.device.type != "cpu":
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(
            tensor, non_blocking=True
        )
    return tensor.to(device, non_blocking=True)
