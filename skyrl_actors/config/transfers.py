"""How weights travel from trainers to engines: a tagged union."""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from skyrl_actors.config.base import FrozenConfig
from skyrl_actors.messages.weights import Freeze

SHARED_MEMORY = Path(f"/dev/shm/skyrl-actors-{os.getuid()}")  # each user's own: others of the machine may use the same name
FREEZE = (
    "full weights: always = a version is written as it is saved; when_needed = it is sent from the weights, and written only before they "
    "change while it was in no engine yet or samples from it are under way; one that was not written and is asked for again is computed "
    "anew from the journal"
)
CHECKSUMS = "crc32 of every tensor of full weights, and of the file of an adapter, where it leaves, compared where it arrives"


class WithFolder(FrozenConfig):
    """Paths mean the same in every process."""

    @field_validator("folder", mode="after", check_fields=False)
    @classmethod
    def _absolute(cls, folder: Path) -> Path:
        return folder.expanduser().absolute()


class ShmTransfer(WithFolder):
    """Trainer and engine on one host: the trainer writes a file in shared memory, the engine maps it."""

    type: Literal["shm"] = "shm"
    folder: Path = SHARED_MEMORY
    checksums: bool = Field(default=False, description=CHECKSUMS)


class ObjectStoreTransfer(WithFolder):
    """Trainer and engine on any hosts: through Ray's object store, then a file in shared memory beside the engine."""

    type: Literal["object_store"] = "object_store"
    folder: Path = SHARED_MEMORY
    checksums: bool = Field(default=True, description=CHECKSUMS)


class DiskTransfer(WithFolder):
    """Any hosts that see one folder: the trainer writes there, engines read it."""

    type: Literal["disk"] = "disk"
    folder: Path = Field(description="on storage that all nodes share")
    checksums: bool = Field(default=True, description=CHECKSUMS)


class LoraTransfer(WithFolder):
    """Adapters only: small folders in shared memory, or on shared storage when there are several hosts."""

    type: Literal["lora"] = "lora"
    folder: Path = SHARED_MEMORY
    checksums: bool = Field(default=True, description=CHECKSUMS)


class GlooTransfer(WithFolder):
    """Any hosts, by TCP: full weights are broadcast from the trainer's memory into the engines, one bucket at a time."""

    type: Literal["gloo"] = "gloo"
    folder: Path = SHARED_MEMORY
    freeze: Freeze = Field(default="when_needed", description=FREEZE)
    bucket_bytes: int = Field(default=64 * 2**20, ge=1)
    timeout_s: float = Field(default=120.0, gt=0, description="longest wait for the other side")
    checksums: bool = Field(default=True, description=CHECKSUMS)


class NcclTransfer(WithFolder):
    """GPUs of their own for trainers and engines: as gloo, over NVLink or the network of the GPUs."""

    type: Literal["nccl"] = "nccl"
    folder: Path = SHARED_MEMORY
    freeze: Freeze = Field(default="when_needed", description=FREEZE)
    bucket_bytes: int = Field(default=2**30, ge=1)
    timeout_s: float = Field(default=120.0, gt=0, description="longest wait for the other side")
    checksums: bool = Field(default=True, description=CHECKSUMS)


class IpcTransfer(WithFolder):
    """Trainers and engines on the same GPUs of one host: each engine copies out of the memory of the trainer beside it."""

    type: Literal["ipc"] = "ipc"
    folder: Path = SHARED_MEMORY
    freeze: Freeze = Field(default="when_needed", description=FREEZE)
    bucket_bytes: int = Field(default=2**28, ge=1, description="of each of two buckets, of which one is filled and one is read")
    timeout_s: float = Field(default=120.0, gt=0, description="longest wait for the other side")
    checksums: bool = Field(default=False, description=CHECKSUMS)


TransferConfig = Annotated[
    ShmTransfer | ObjectStoreTransfer | DiskTransfer | LoraTransfer | GlooTransfer | NcclTransfer | IpcTransfer,
    Field(discriminator="type"),
]


class LogprobCheck(FrozenConfig):
    """A fixed prompt is scored by the trainer when a version or a checkpoint for sampling is saved, and by each engine before it first
    answers from it. Not compared is what a trainer of another dtype saved."""

    action: Literal["off", "warn", "auto", "refuse"] = Field(
        default="auto",
        description="when they differ by more than the bound: warn in the log, or refuse to sample that version; auto = warn, and refuse "
        "beyond ten times the bound",
    )
    bound: float | None = Field(
        default=None, gt=0, description="of the mean |Δ logprob| in nats; none = 1e-4 where both compute in float32, else 0.05"
    )
