"""The mesh of ranks that share one copy of the weights.

Its axis `fsdp` divides the tokens of a pass and one axis of each matrix, and its axis `tensor` the
other axis of each matrix. XLA adds the transfers. Adapters, inputs and results are whole on each
device. The ranks of a mesh get the same rows, so they run the same programs in the same order. They
are the processes of one group of `jax.distributed`, whose coordinator is in the first of them.

A process cannot join a second group. When a rank dies, all ranks of the group are replaced.
"""

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jaxlib.version
import numpy as np
import torch
import torch.distributed as dist
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import Tensor

from skyrl_actors.config.strategies import JaxStrategy
from skyrl_actors.jax_workers.arrays import FSDP, TENSOR, Axes
from skyrl_actors.jax_workers.devices import own_device
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.workers.interface import WorkerSpec
from skyrl_actors.workers.rank_groups import own_group

log = logging.getLogger(__name__)
TEXT_BYTES = 1024  # of a text that ranks exchange
HEARTBEAT_S = 100  # Ray reports the death of a rank sooner


@dataclass(frozen=True, slots=True)
class MeshGroups:
    """The process groups of a rank in torch."""

    mesh: dist.ProcessGroup  # the ranks of its mesh
    copies: dist.ProcessGroup | None  # those with the same place in other meshes
    first: int  # the first rank of its mesh

    def sum_over_copies(self, gradients: Tensor) -> None:
        """Sum gradients over meshes, and make them equal to the bit on the ranks of a mesh.

        The ranks of a mesh have equal gradients, but their processors can round differently.
        """
        if self.copies is not None:
            dist.all_reduce(gradients, group=self.copies)
        dist.broadcast(gradients, self.first, group=self.mesh)

    def texts(self, own: str) -> list[str]:
        """Return the texts of all ranks of the mesh. Collective."""
        mine = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
        encoded = bytearray(own.encode()[:TEXT_BYTES])
        mine[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.mesh))]
        dist.all_gather(found, mine, group=self.mesh)
        return [bytes(each.tolist()).rstrip(b"\0").decode(errors="ignore") for each in found]


def groups_of(spec: WorkerSpec, size: int) -> MeshGroups:
    """Create the process groups of meshes of consecutive ranks. Collective."""
    world, timeout_s = spec.world_size, spec.collective_timeout_s
    starts = range(0, world, size)
    mesh = own_group(tuple(tuple(range(start, start + size)) for start in starts), timeout_s)
    copies = None
    if world > size:
        places = tuple(tuple(range(place, world, size)) for place in range(size))
        copies = own_group(places, timeout_s)
    return MeshGroups(mesh, copies, spec.rank // size * size)


class DeviceMesh:
    """Arrays over the devices of a mesh. See `Devices`."""

    def __init__(self, devices: Sequence[Any], strategy: JaxStrategy):
        grid = np.asarray(devices).reshape(strategy.fsdp, strategy.tensor)
        self._mesh = Mesh(grid, (FSDP, TENSOR))
        self._whole = NamedSharding(self._mesh, PartitionSpec())

    def __repr__(self) -> str:
        """Return what a program depends on."""
        return f"{self._mesh}"

    alone = False

    @property
    def keeps_programs(self) -> bool:
        """XLA's file of a program for CPUs lacks the order of transfers, so ranks can deadlock."""
        return self._mesh.devices.flat[0].platform != "cpu"

    def put(self, tensor: Tensor, axes: Axes = ()) -> Array:
        values = _numpy(tensor.detach())
        return jax.make_array_from_callback(
            values.shape, self._sharding(values.shape, axes), lambda part: values[part]
        )

    def stacked(self, read: Sequence[Callable[[], Tensor]], axes: Axes) -> Array:
        """Hold no more than one whole tensor and the rank's parts of the others."""
        first = read[0]()
        shape = (len(read), *first.shape)
        sharding = self._sharding(shape, (None, *axes))
        made: dict[str, np.ndarray] = {}

        def own(part: Any) -> np.ndarray:
            if str(part) not in made:
                chosen = range(len(read))[part[0]]
                made[str(part)] = np.stack([_numpy(read[i]())[part[1:]] for i in chosen])
            return made[str(part)]

        return jax.make_array_from_callback(shape, sharding, own)

    def _sharding(self, shape: Sequence[int], axes: Axes) -> NamedSharding:
        """An axis that the mesh does not divide evenly stays whole."""
        sizes = self._mesh.shape
        even = (
            axis if axis and length % sizes[axis] == 0 else None
            for axis, length in zip(axes, shape, strict=False)
        )
        return NamedSharding(self._mesh, PartitionSpec(*even))

    def given(self, tree: Any) -> Any:
        def one(values: np.ndarray) -> Array:
            return jax.make_array_from_callback(
                values.shape, self._whole, lambda part: values[part]
            )

        return jax.tree.map(one, tree)

    def spread(self, x: Array) -> Array:
        return jax.lax.with_sharding_constraint(x, self._sharding(x.shape, (FSDP,)))

    def jit(self, function: Callable[..., Any], keeps: bool) -> Any:
        results = (self._whole, None) if keeps else self._whole
        return jax.jit(function, out_shardings=results)


def _numpy(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:  # numpy has no such type of its own
        return tensor.contiguous().view(torch.uint16).numpy().view(jax.numpy.bfloat16)
    return tensor.contiguous().numpy()


def join(spec: WorkerSpec, strategy: JaxStrategy, groups: MeshGroups, address: str) -> DeviceMesh:
    """Join the ranks of a mesh. Nothing in this process may have used a device of JAX before.

    `address` is that of the group's first rank. Raises ConfigError if versions of JAX differ.
    """
    size, place = strategy.mesh_ranks, spec.rank % strategy.mesh_ranks
    _check_versions(spec, groups)
    own = _own_address(address)
    coordinator = groups.texts(f"{own}:{_free_port(own)}")[0]
    # The other ranks report the death of one as an error, instead of ending too.
    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(
        coordinator,
        size,
        place,
        initialization_timeout=int(spec.collective_timeout_s),
        coordinator_bind_address=coordinator,
        heartbeat_timeout_seconds=HEARTBEAT_S,
        cluster_detection_method="deactivate",
    )
    own_device(spec.device)  # names what is missing
    seen = sorted(jax.devices(), key=lambda device: device.process_index)
    devices = {device.process_index: device for device in reversed(seen)}
    log.info("rank %d joined a mesh of %d fsdp x %d tensor", spec.rank, *strategy.mesh)
    return DeviceMesh([devices[process] for process in range(size)], strategy)


def _check_versions(spec: WorkerSpec, groups: MeshGroups) -> None:
    own = f"jax {jax.__version__} and jaxlib {jaxlib.version.__version__}"
    found = groups.texts(own)
    if len({*found}) > 1:
        listed = ", ".join(
            f"{spec.role}[{groups.first + place}] has {text}" for place, text in enumerate(found)
        )
        raise ConfigError(
            f"strategy jax: the ranks of a mesh need equal versions, and {listed}; install one "
            "version on all nodes"
        )


def _own_address(towards: str) -> str:
    """Return the address of this machine from which it reaches another."""
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # sends nothing
        found = probe.getsockname()[0]
    return f"[{found}]" if family == socket.AF_INET6 else found


def _free_port(address: str) -> int:
    family = socket.AF_INET6 if address.startswith("[") else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((address.strip("[]"), 0))
        return int(probe.getsockname()[1])
