"""GPUs as NVML shows them. Where no driver is, none are shown."""

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from skyrl_actors.observe import devices

MIG = "MIG-1"


class Nvml:
    """Two GPUs, a part of a GPU, and one GPU that fell off the bus."""

    NVMLError = pynvml.NVMLError
    GPUS = {0: "GPU-a", 1: "GPU-b", 2: MIG}

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        if index not in self.GPUS:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return self.GPUS[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        return SimpleNamespace(used=3 * 2**30, total=80 * 2**30)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802
        if handle == MIG:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(gpu=40)

    def nvmlDeviceGetUUID(self, handle: str) -> str:  # noqa: N802
        return handle

    def nvmlDeviceGetName(self, handle: str) -> str:  # noqa: N802
        return "NVIDIA H100"


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch):
    devices._library.cache_clear()
    monkeypatch.setattr(devices, "NVML", Nvml())
    yield
    devices._library.cache_clear()


@pytest.mark.parametrize(
    ("listed", "ids"),
    [
        (None, []),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0", ["0"]),
        ("2, GPU-a", ["2", "GPU-a"]),
        ("1,-1,0", ["1"]),
    ],
)
def test_gpus_are_those_that_cuda_sees(listed: str | None, ids: list[str]):
    assert devices.visible_ids(listed) == ids


@pytest.mark.usefixtures("nvml")
def test_gpus_are_read_by_index_or_uuid_and_lost_ones_left_out():
    found = devices.read(["1", "7", "GPU-a", "2"])
    assert [d.uuid for d in found] == ["GPU-b", "GPU-a", MIG]
    assert [d.utilization for d in found] == [0.4, 0.4, None], "parts of a GPU do not report it"
    assert (found[0].used_bytes, found[0].total_bytes) == (3 * 2**30, 80 * 2**30)
    assert found[0].name == "NVIDIA H100"


def test_without_a_driver_there_are_none(monkeypatch: pytest.MonkeyPatch):
    class Without(Nvml):
        def nvmlInit(self) -> None:  # noqa: N802
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    devices._library.cache_clear()
    monkeypatch.setattr(devices, "NVML", Without())
    assert devices.read(["0"]) == ()
    devices._library.cache_clear()
