"""What a GPU has in use."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUsage:
    """One GPU as `nvidia-smi` shows it, with the memory of all processes."""

    uuid: str
    name: str
    used_bytes: int
    total_bytes: int
    utilization: float | None  # share of the last second in which it computed; None: not known
