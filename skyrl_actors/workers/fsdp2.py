"""Weights that torch's `fully_shard` (FSDP2) shards over ranks: a frozen base, or a full fine-tune.

Each rank reads only its rows of each tensor. Gradients are summed, not averaged. A divide factor of
one alone selects a pre-scaled sum, which gloo lacks, so the plain sum is forced as well.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from skyrl_actors.config.strategies import Fsdp2Strategy
from skyrl_actors.messages.model import AdamParams
from skyrl_actors.workers.buffers import fill_buffers, stored_buffers
from skyrl_actors.workers.interface import Activations
from skyrl_actors.workers.meta_model import (
    own_names,
    shell,
    trained_names,
    value_head_for,
    weights_of,
)
from skyrl_actors.workers.network import Network
from skyrl_actors.workers.pending_gradients import PendingGradients
from skyrl_actors.workers.rank_groups import ShardGroups
from skyrl_actors.workers.sharded_files import Piece
from skyrl_actors.workers.state import (
    HOST,
    MOMENTS,
    Kind,
    check_names,
    check_norm,
    parameter_groups,
    sum_of_squares,
    update_groups,
)
from skyrl_actors.workers.tensor_files import Shape, Source


class ShardedNetwork(Network):
    """A network whose weights are sharded over the ranks."""

    def move(self, device: torch.device) -> None:
        """Move the shards, and the vision tower, without the features of images."""
        if self.tower is not None:
            self.tower.forget()
        self.whole.to(device)

    def end_pass(self) -> None:
        """Drop the gathered weights that a pass has left.

        A backward pass drops them by itself. After a forward pass alone, the root's weights stay,
        and so do those of every layer with `reshard_after_forward=False`. The next pass would
        compute with them even after a step or a load changed the shards.
        """
        cast(FSDPModule, self.whole).reset_iter_state()


def sharded_network(
    strategy: Fsdp2Strategy,
    groups: ShardGroups,
    folder: str,
    dtype: torch.dtype,
    device: torch.device,
    activations: Activations,
    trained: bool,
    is_critic: bool = False,
) -> Network:
    """Build the sharded network.

    A trained network is stored in float32 and computes in `dtype`; a frozen one is stored in
    `dtype`.
    """
    module = shell(folder, torch.float32 if trained else dtype)
    network = ShardedNetwork(module, device, activations, value_head_for(module, is_critic))
    if not trained:
        module.requires_grad_(False)
    mesh = DeviceMesh.from_group(groups.shards, device.type)
    lower = trained and dtype != torch.float32
    sent = getattr(torch, strategy.gradient_dtype)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            dtype if lower else None,
            sent if lower or sent != torch.float32 else None,
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")
        if strategy.offload == "all"
        else OffloadPolicy(),
    }
    for layer in network.layers:
        fully_shard(layer, reshard_after_forward=strategy.reshard_after_forward, **options)
    # Each rank computes the features of its own images, so each has the whole vision tower.
    tower = set(network.tower_weights.values())
    for weight in tower:
        weight.requires_grad_(False)
    if is_critic:
        in_float32 = MixedPrecisionPolicy(None, options["mp_policy"].reduce_dtype)
        head = {**options, "mp_policy": in_float32}
        fully_shard(network.whole.value_head, reshard_after_forward=False, **head)
    fully_shard(network.whole, reshard_after_forward=False, ignored_params=tower, **options)
    _add_gradients(network.whole)
    _materialize(network, torch.device("cpu") if strategy.offload == "all" else device)
    parameters = own_names(network.whole)
    stored = {**parameters, **stored_buffers(network.module)}
    with weights_of(
        folder,
        torch.float32 if trained else dtype,
        network.stored_form,
        {name: tuple(tensor.shape) for name, tensor in stored.items()},
    ) as source:
        fill(parameters, source)
        fill_buffers(network.module, source)
    _place_whole_parts(network, device, dtype)
    return network


def _add_gradients(whole: nn.Module) -> None:
    """Let ranks add gradients instead of averaging them."""
    for part in whole.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def _place_whole_parts(network: Network, device: torch.device, dtype: torch.dtype) -> None:
    """Move what is not sharded to the device, also if the shards stay on the host."""
    for weight in network.tower_weights.values():
        weight.data = weight.data.to(device, dtype)
    # Buffers keep their dtypes: rotary frequencies must not be rounded.
    for part in network.whole.modules():
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = buffer.to(device)


def _materialize(network: Network, device: torch.device) -> None:
    buffers = {name: buffer.clone() for name, buffer in network.whole.named_buffers()}
    network.whole.to_empty(device=device)
    for name, buffer in network.whole.named_buffers():
        buffer.copy_(buffers[name])
    network.module.tie_weights()
    with torch.no_grad():
        for name, parameter in own_names(network.whole).items():
            if name.startswith("value_head"):
                cast(DTensor, parameter).to_local().zero_()


def fill(parameters: Mapping[str, nn.Parameter], source: Source) -> None:
    """Copy each rank's rows of every tensor in the source."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name not in source.shapes:
                continue
            if isinstance(parameter, DTensor):
                _fill_rows(parameter, source, name)
            else:
                content = source.range(name, 0, parameter.numel())
                parameter.copy_(content.view(parameter.shape))


def _fill_rows(parameter: DTensor, source: Source, name: str) -> None:
    local = parameter.to_local()
    row, start = math.prod(parameter.shape[1:]), _own_rows(parameter)
    local.copy_(source.range(name, start * row, (start + len(local)) * row).view(local.shape))


def _own_rows(parameter: DTensor) -> int:
    """Return the first row that this rank holds."""
    mesh = parameter.device_mesh
    each = -(-parameter.shape[0] // mesh.size())
    return min(mesh.get_local_rank() * each, parameter.shape[0])


class Fsdp2State:
    """State of a full fine-tune that FSDP2 shards."""

    whole = False

    def __init__(self, network: Network, strategy: Fsdp2Strategy, groups: ShardGroups):
        self._network = cast(ShardedNetwork, network)
        self._groups = groups
        self._sent: torch.dtype = getattr(torch, strategy.gradient_dtype)
        self._stays_on_host = strategy.offload == "all"
        self.parameters = cast("dict[str, DTensor]", trained_names(network.whole))
        self.shapes: dict[str, Shape] = {
            name: tuple(p.shape) for name, p in self.parameters.items()
        }
        self.pending = False
        self.gradients = PendingGradients(
            cast("list[nn.Parameter]", list(self.parameters.values()))
        )
        self.optimizer = self._new_optimizer()

    def _new_optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(parameter_groups(self.parameters, self.shapes), lr=0.0, fused=True)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def backward(self, surrogate: Tensor) -> None:
        surrogate.backward()
        self.pending = True

    def drop_gradients(self) -> None:
        self.pending = False
        self.gradients.drop()
        for parameter in self.parameters.values():
            parameter.grad = None

    def step(self, adam: AdamParams) -> float:
        squares = torch.zeros((), dtype=torch.float64, device=self._network.device)
        for parameter in self.parameters.values():
            if parameter.grad is None:
                # A zero gradient: moments and weight decay still apply.
                parameter.grad = torch.zeros_like(parameter)
            local = cast(DTensor, parameter.grad).to_local()
            self._add_copies(local)
            squares += sum_of_squares(local).to(squares.device)
        dist.all_reduce(squares, group=self._groups.shards)
        norm = float(squares.sqrt())
        check_norm(norm, self, adam.grad_clip_norm)
        if adam.grad_clip_norm > 0 and norm > adam.grad_clip_norm:
            for parameter in self.parameters.values():
                cast(DTensor, parameter.grad).to_local().mul_(adam.grad_clip_norm / norm)
        update_groups(self.optimizer.param_groups, adam)
        self.optimizer.step()
        self.drop_gradients()
        return norm

    def _add_copies(self, gradient: Tensor) -> None:
        """Sum a shard's gradient over the copies of the weights."""
        if self._groups.replicas is None:
            return
        sent = gradient.to(self._network.device, self._sent)
        dist.all_reduce(sent, group=self._groups.replicas)
        gradient.copy_(sent)

    @property
    def num_steps(self) -> int:
        state = next(iter(self.optimizer.state.values()), None)
        return 0 if state is None else int(_local(state["step"]))

    def tensors(
        self,
        kind: Kind,
        dtype: torch.dtype = torch.float32,
        device: torch.device = HOST,
        everywhere: bool = False,
    ) -> Iterator[tuple[str, Tensor | None]]:
        receives = everywhere or dist.get_rank() == 0
        for name, parameter in self.parameters.items():
            if not (self._groups.writes or everywhere):
                yield name, None
                continue
            held = parameter if kind == "weights" else self.optimizer.state[parameter][kind]
            full = self._whole(cast(DTensor, held.detach()), dtype)
            yield name, full.to(device) if receives else None

    def _whole(self, held: DTensor, dtype: torch.dtype) -> Tensor:
        """Gather a tensor on the network's device, because NCCL gathers no host memory."""
        local = held.to_local().to(self._network.device, dtype)
        return DTensor.from_local(
            local,
            held.device_mesh,
            held.placements,
            run_check=False,
            shape=held.shape,
            stride=held.stride(),
        ).full_tensor()

    def own_pieces(self, kind: Kind) -> Iterator[Piece]:
        for name, parameter in self.parameters.items() if self._groups.writes else ():
            held = parameter if kind == "weights" else self.optimizer.state[parameter][kind]
            local = cast(DTensor, held.detach()).to_local()
            yield name, _own_rows(parameter) * math.prod(parameter.shape[1:]), local

    def load(self, source: Source) -> None:
        check_names(self.shapes, source.shapes)
        fill(cast("dict[str, nn.Parameter]", self.parameters), source)

    def load_moments(self, sources: Mapping[Kind, Source], num_steps: int) -> None:
        self.optimizer = self._new_optimizer()
        if not sources:
            return
        for kind in MOMENTS:
            check_names(self.shapes, sources[kind].shapes)
        for name, parameter in self.parameters.items():
            moments: dict[Kind, DTensor] = {
                kind: cast(DTensor, torch.zeros_like(parameter).detach()) for kind in MOMENTS
            }
            for kind, moment in moments.items():
                _fill_rows(moment, sources[kind], name)
            step = torch.tensor(float(num_steps), device=parameter.to_local().device)
            self.optimizer.state[parameter] = {"step": step, **moments}

    def close(self) -> None:
        self.optimizer.state.clear()

    def move(self, part: str, device: torch.device) -> None:
        if self._stays_on_host:
            return
        if part == "weights":
            self._network.move(device)
        elif part == "gradients":
            self.gradients.move(device)
        elif part == "optimizer":
            for state in self.optimizer.state.values():
                state.update({key: value.to(device) for key, value in state.items()})


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
