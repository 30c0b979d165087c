"""How weights are transferred from trainers to engines: a tagged union."""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from skyrl_actors.config.frozen import FrozenConfig
from skyrl_actors.messages.weights import Materialize

# one for each user, because another user of the machine can use the same service name
SHARED_MEMORY = Path(f"/dev/shm/skyrl-actors-{os.getuid()}")
MATERIALIZE = (
    "for full weights. eager: every saved version is written to a file. "
    "lazy: a version is sent directly from the live weights. It is written to a file only if the "
    "weights are about to change and either no engine has it yet or samples from it are running. "
    "A version that was not written and is requested again is computed again from the journal"
)
FOLDER = "folder for files of exported weights"
CHECKSUMS = (
    "compute the crc32 of every tensor of full weights, and of the file of an adapter, "
    "at the sender, and compare it at the receiver"
)


class WithFolder(FrozenConfig):
    """Base class that makes `folder` absolute, to name the same folder in every process."""

    @field_validator("folder", mode="after", check_fields=False)
    @classmethod
    def _absolute(cls, folder: Path) -> Path:
        return folder.expanduser().absolute()


class ShmTransfer(WithFolder):
    """For one host: the trainer writes a file in shared memory, and the engine maps it."""

    type: Literal["shm"] = "shm"
    folder: Path = Field(default=SHARED_MEMORY, description=FOLDER)
    checksums: bool = Field(default=False, description=CHECKSUMS)


class ObjectStoreTransfer(WithFolder):
    """For any hosts: weights go through Ray's object store.

    They arrive in a file in shared memory on the engine's host.
    """

    type: Literal["object_store"] = "object_store"
    folder: Path = Field(default=SHARED_MEMORY, description=FOLDER)
    checksums: bool = Field(default=True, description=CHECKSUMS)


class DiskTransfer(WithFolder):
    """For hosts with a shared folder: the trainer writes there, and engines read it."""

    type: Literal["disk"] = "disk"
    folder: Path = Field(description="folder on storage that all nodes share")
    checksums: bool = Field(default=True, description=CHECKSUMS)


class LoraTransfer(WithFolder):
    """For adapters only: files in shared memory, or on shared storage with several hosts."""

    type: Literal["lora"] = "lora"
    folder: Path = Field(default=SHARED_MEMORY, description=FOLDER)
    checksums: bool = Field(default=True, description=CHECKSUMS)


class GlooTransfer(WithFolder):
    """For any hosts: full weights are broadcast over TCP.

    They go from the memory of the trainer to the engines in buckets.
    """

    type: Literal["gloo"] = "gloo"
    folder: Path = Field(default=SHARED_MEMORY, description=FOLDER)
    materialize: Materialize = Field(default="lazy", description=MATERIALIZE)
    bucket_bytes: int = Field(default=64 * 2**20, ge=1, description="size of a bucket")
    timeout_s: float = Field(default=120.0, gt=0, description="longest wait for the other process")
    checksums: bool = Field(default=True, description=CHECKSUMS)


class NcclTransfer(WithFolder):
    """For trainers and engines on separate GPUs.

    Like gloo, but over NVLink or the network of the GPUs.
    """

    type: Literal["nccl"] = "nccl"
    folder: Path = Field(default=SHARED_MEMORY, description=FOLDER)
    materialize: Materialize = Field(default="lazy", description=MATERIALIZE)
    bucket_bytes: int = Field(default=2**30, ge=1, description="size of a bucket")
    timeout_s: float = Field(default=120.0, gt=0, description="longest wait for the other process")
    checksums: bool = Field(default=True, description=CHECKSUMS)


class IpcTransfer(WithFolder):
    """For trainers and engines on the same GPUs of one host.

    Each engine copies from the GPU memory of the trainer.
    """

    type: Literal["ipc"] = "ipc"
    folder: Path = Field(default=SHARED_MEMORY, description=FOLDER)
    materialize: Materialize = Field(default="lazy", description=MATERIALIZE)
    bucket_bytes: int = Field(
        default=2**28,
        ge=1,
        description="size of each of two buckets; one is filled while the other is read",
    )
    timeout_s: float = Field(default=120.0, gt=0, description="longest wait for the other process")
    checksums: bool = Field(default=False, description=CHECKSUMS)


TransferConfig = Annotated[
    ShmTransfer
    | ObjectStoreTransfer
    | DiskTransfer
    | LoraTransfer
    | GlooTransfer
    | NcclTransfer
    | IpcTransfer,
    Field(discriminator="type"),
]


class LogprobCheckConfig(FrozenConfig):
    """A comparison of engine and trainer on a fixed prompt.

    The trainer scores the prompt when it saves a version or a checkpoint for sampling. Each engine
    scores it before its first answer from that version. Versions that a trainer of another dtype
    saved are not compared.
    """

    action: Literal["off", "warn", "auto", "refuse"] = Field(
        default="auto",
        description="if the difference exceeds `bound`. warn: write to the log; "
        "refuse: do not sample from that version; auto: warn, "
        "and refuse beyond ten times the bound",
    )
    bound: float | None = Field(
        default=None,
        gt=0,
        description="bound of the mean |Δ logprob| in nats; null = 1e-4 if both compute in "
        "float32, otherwise 0.05",
    )
