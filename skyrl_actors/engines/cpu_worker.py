"""A vLLM worker for CPUs that can sleep. Only engines on CPUs import this module.

vLLM's module of the CPU worker replaces `torch.cuda.Event`, `Stream` and `Tensor.pin_memory` of the
process when it is imported.
"""

import ctypes
import gc
import mmap
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_worker import CPUWorker

from skyrl_actors.engines import cpu_experts, cpu_mxfp4, cpu_rotary, cpu_routes, vllm_patches

if vllm_patches.AFFECTED:
    cpu_experts.register()
    cpu_mxfp4.admit()
    cpu_mxfp4.register()
    cpu_rotary.register()
    cpu_routes.admit()


class SleepyCpuWorker(CPUWorker):
    """A CPU worker that can sleep; vLLM's own CPU worker only logs that it cannot.

    Sleep returns the pages of the KV cache to the operating system, at level 2 also those of the
    weights.
    """

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        cpu_routes.collect(self.model_runner)

    def sleep(self, level: int = 1) -> None:
        self.discard(("kv_cache",))
        if level == 2:
            self._drop_weights()
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Do nothing: pages return when touched, and a weight update must refill the weights."""

    def discard(self, tags: tuple[str, ...]) -> None:
        if "kv_cache" in tags:
            for storage in self._kv_storages():
                drop_pages(storage)

    def synchronize_device(self) -> None:
        pass

    def _kv_storages(self) -> list[torch.UntypedStorage]:
        storages: dict[int, torch.UntypedStorage] = {}
        for cache in self.model_runner.kv_caches:
            for tensor in cache if isinstance(cache, list | tuple) else [cache]:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return list(storages.values())

    def _drop_weights(self) -> None:
        model: Any = self.model_runner.get_model()
        for module in model.modules():
            if hasattr(module, "cpu_linear"):
                module.cpu_linear = None  # oneDNN's packed copy; the weight update repacks
        for parameter in model.parameters():
            if parameter.numel():
                drop_pages(parameter.untyped_storage())


def drop_pages(storage: torch.UntypedStorage) -> None:
    """Return the whole pages of an anonymous mapping to the operating system.

    They read as zeros afterwards.
    """
    start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= start:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if libc.madvise(start, end - start, mmap.MADV_DONTNEED) != 0:
        raise OSError(ctypes.get_errno(), "madvise(MADV_DONTNEED) failed")
