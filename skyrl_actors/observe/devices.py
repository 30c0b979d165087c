"""Read the memory and the utilization of this process's GPUs with NVML, without touching CUDA."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pynvml  # pyright: ignore[reportMissingTypeStubs]

from skyrl_actors.messages.device_usage import DeviceUsage

NVML: Any = pynvml  # its signatures have no types


def visible_ids(listed: str | None) -> list[str]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES lists, by index or UUID. None lists no GPU.

    Ray sets it for every actor that has GPUs. CUDA ignores what follows the first -1.
    """
    ids = [text.strip() for text in (listed or "").split(",")]
    bad = next((at for at, text in enumerate(ids) if text in ("", "-1", "NoDevFiles")), len(ids))
    return ids[:bad]


def read(ids: Sequence[str]) -> tuple[DeviceUsage, ...]:
    """Return these GPUs. Those that NVML cannot read are left out."""
    if not ids or not _library():
        return ()
    found: list[DeviceUsage] = []
    for each in ids:
        try:
            found.append(_one(each))
        except NVML.NVMLError:
            continue
    return tuple(found)


@cache
def _library() -> bool:
    """Load NVML. Return False where there is no driver."""
    try:
        NVML.nvmlInit()
    except NVML.NVMLError:
        return False
    return True


def _one(of: str) -> DeviceUsage:
    handle = (
        NVML.nvmlDeviceGetHandleByIndex(int(of))
        if of.isdigit()
        else NVML.nvmlDeviceGetHandleByUUID(of)
    )
    memory = NVML.nvmlDeviceGetMemoryInfo(handle)
    try:
        utilization = NVML.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except NVML.NVMLError:  # parts of a GPU (MIG) have none
        utilization = None
    return DeviceUsage(
        uuid=NVML.nvmlDeviceGetUUID(handle),
        name=NVML.nvmlDeviceGetName(handle),
        used_bytes=int(memory.used),
        total_bytes=int(memory.total),
        utilization=utilization,
    )
