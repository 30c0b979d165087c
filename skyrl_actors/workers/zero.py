"""Weights, gradients or moments that DeepSpeed ZeRO shards over the ranks.

This holds a full fine-tune, or (stage 3, without an optimizer) the frozen base under adapters.
Gradient accumulation is unmanaged: any number of backward passes, then one step. DeepSpeed averages
over ranks, so losses are multiplied by their number. Comments explain the settings whose defaults
are wrong for this use.
"""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cuda" if os.environ.get("CUDA_VISIBLE_DEVICES") else "cpu")

os.environ.setdefault("LOCAL_RANK", "0")  # each rank has one visible device

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Offloaded
from deepspeed.utils import (
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor

from skyrl_actors.config.strategies import DeepSpeedStrategy
from skyrl_actors.messages.model import AdamParams
from skyrl_actors.transport.device_memory import placed
from skyrl_actors.workers.adapter_terms import whole_shape
from skyrl_actors.workers.blocks import Block
from skyrl_actors.workers.buffers import fill_buffers, stored_buffers
from skyrl_actors.workers.interface import Activations
from skyrl_actors.workers.meta_model import own_names, trained_names, value_head_for, weights_of
from skyrl_actors.workers.network import Network, PassInputs, Segment
from skyrl_actors.workers.pending_gradients import PendingGradients
from skyrl_actors.workers.sharded_files import Piece
from skyrl_actors.workers.state import (
    HOST,
    MOMENTS,
    Kind,
    check_names,
    check_norm,
    parameter_groups,
    update_groups,
)
from skyrl_actors.workers.tensor_files import Shape, Source, whole
from skyrl_actors.workers.zero_module import check_can_be_partitioned, module_in, norm_before
from skyrl_actors.workers.zero_settings import zero_settings

# This operator is for inference. Each start on a CPU would compile it, and it fails without a
# compiler.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

_engine_class: Any = DeepSpeedEngine
_check_optimizer = _engine_class._do_optimizer_sanity_check


def _same_class_for_every_dtype(engine: DeepSpeedEngine, optimizer: torch.optim.Optimizer) -> str:
    """Return ZeRO's optimizer class for all dtypes.

    In bfloat16, stage 1 would select another class, whose state cannot leave the device.
    """
    _check_optimizer(engine, optimizer)
    return ZERO_OPTIMIZATION


_engine_class._do_optimizer_sanity_check = _same_class_for_every_dtype


def zero_network(
    strategy: DeepSpeedStrategy,
    folder: str,
    dtype: torch.dtype,
    device: torch.device,
    activations: Activations,
    trained: bool,
    is_critic: bool = False,
) -> tuple[Network, Any]:
    """Return the network and its engine."""
    config = zero_settings(strategy, dtype, trained)
    partitioned = strategy.stage == 3
    shards = deepspeed.zero.Init(config_dict_or_path=config) if partitioned else nullcontext()
    module = module_in(shards, folder, dtype).to(device)
    if partitioned:
        check_can_be_partitioned(module)
    # DeepSpeed needs a value head of the same dtype as the other parameters.
    value_head = value_head_for(module, is_critic)
    network = Network(module, device, activations, value_head and value_head.to(dtype))
    parameters = own_names(network.whole)
    shapes = {n: whole_shape(p) for n, p in (parameters | stored_buffers(module)).items()}
    with (
        weights_of(folder, dtype, network.stored_form, shapes) as source,
        torch.no_grad(),
    ):
        fill_buffers(module, source)
        for name, parameter in parameters.items():
            if name in source.shapes:
                _fill(parameter, source, name)
    arguments: dict[str, Any] = {
        "model": network.whole,
        "config": config,
        "dist_init_required": False,
    }
    if trained:
        owned = trained_names(network.whole)
        groups = parameter_groups(owned, {n: whole_shape(p) for n, p in owned.items()})
        arguments["optimizer"] = torch.optim.AdamW(groups, lr=0.0, fused=True)
    else:
        module.requires_grad_(False)
    engine, *_ = deepspeed.initialize(**arguments)
    made: Any = engine
    network.entry = made if trained else made.module
    return network, engine


def _fill(parameter: Any, source: Source, name: str) -> None:
    if not hasattr(parameter, "ds_tensor"):
        parameter.copy_(whole(source, name))
        return
    start, stop = _own_range(parameter)
    parameter.ds_tensor.data.view(-1)[: stop - start].copy_(source.range(name, start, stop))
    # A small tensor, which stays gathered.
    if parameter.data.numel() == math.prod(whole_shape(parameter)):
        parameter.data.view(-1).copy_(whole(source, name).view(-1))


def _own_range(parameter: Any) -> tuple[int, int]:
    """Return the range of this rank's part in stage 3. The last parts can be padding."""
    size, total = parameter.ds_tensor.ds_numel, math.prod(whole_shape(parameter))
    start = min(dist.get_rank() * size, total)
    return start, min(start + size, total)


class ZeroState:
    """State of a full fine-tune that DeepSpeed shards."""

    whole = False

    def __init__(self, network: Network, engine: Any, strategy: DeepSpeedStrategy):
        self._network, self._engine, self._stage = network, engine, strategy.stage
        self._optimizer = engine.optimizer
        # A step whose norm is not finite is skipped, also in float32.
        self._optimizer.check_grad_overflow = True
        self.parameters: dict[str, Any] = trained_names(network.whole)
        self.shapes: dict[str, Shape] = {
            name: whole_shape(p) for name, p in self.parameters.items()
        }
        self.pending = False
        # Of this rank: in stage 1, a rank without rows has none although the model has.
        self._has_own_gradient = False
        self.num_steps = 0
        # Stage 1 in bfloat16 accumulates in a float32 attribute, and stage 2 in its own lists.
        in_attribute = getattr(self._optimizer, "use_grad_accum_attribute", False)
        self.gradients = PendingGradients(
            self.parameters.values(), "grad_accum" if in_attribute else "grad"
        )
        self._away: set[str] = set()  # parts that are off the device
        self._moved_by_engine = {
            "weights": {Offloaded.lp_params}
            if self._stage == 3
            else {Offloaded.lp_params, Offloaded.hp_params},
            "gradients": {Offloaded.contiguous_grad_buffer},
        }

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def backward(self, surrogate: Tensor) -> None:
        self._engine.backward(surrogate * dist.get_world_size(), scale_wrt_gas=False)
        self.pending = self._has_own_gradient = True

    def _add_zeros(self) -> None:
        """Run a backward pass with a zero gradient, as DeepSpeed fails in a step without one."""
        network, place = self._network, self._network.device
        token = torch.zeros(1, dtype=torch.int64, device=place)
        is_critic = hasattr(network.whole, "value_head")
        inputs = PassInputs(
            tokens=token,
            positions=token,
            blocks=(Block(0, 1, 1),),
            segments=(Segment(1, {}, 1.0),),
            targets=None if is_critic else token,
            counted=None,
        )
        with network.in_use(inputs.segments):
            self.backward((network.predict(inputs)[0] * 0.0).sum())

    def drop_gradients(self) -> None:
        """Drop the pending gradients.

        The optimizer's `zero_grad` is enough in stages 1 and 3. Stage 2 keeps reduced gradients
        elsewhere.
        """
        self.pending = self._has_own_gradient = False
        self.gradients.drop()
        self._optimizer.zero_grad()
        if self._stage == 2:
            for kept in (self._optimizer.averaged_gradients, self._optimizer.all_grad_tensors):
                for key in kept:
                    kept[key] = None
            self._engine.zero_grad()

    def step(self, adam: AdamParams) -> float:
        if not self._has_own_gradient:
            self._add_zeros()
        self._optimizer.clip_grad = clip = adam.grad_clip_norm
        check_norm(norm_before(self._optimizer), self, clip)
        update_groups(self._optimizer.param_groups, adam)
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        self.pending = self._has_own_gradient = False
        check_norm(norm, self, clip)
        self.num_steps += 1
        if self.num_steps == 1:
            self._link_moments()
        return norm

    def tensors(
        self,
        kind: Kind,
        dtype: torch.dtype = torch.float32,
        device: torch.device = HOST,
        everywhere: bool = False,
    ) -> Iterator[tuple[str, Tensor | None]]:
        receives = everywhere or dist.get_rank() == 0
        for name, shape in self.shapes.items():
            # DeepSpeed's own functions gather float32 and not always on the device. Here each rank
            # adds its piece to zeros.
            full = torch.zeros(shape, dtype=dtype, device=self._network.device)
            if (piece := self._own_piece(name, kind)) is not None:
                start, held = piece
                full.view(-1)[start : start + held.numel()].copy_(held)
            dist.all_reduce(full)
            yield name, full.to(device) if receives else None

    def own_pieces(self, kind: Kind) -> Iterator[Piece]:
        for name in self.shapes:
            if (piece := self._own_piece(name, kind)) is not None:
                yield name, *piece

    def _own_piece(self, name: str, kind: Kind) -> tuple[int, Tensor] | None:
        """Return this rank's range of a tensor, [n] float32, and its start."""
        parameter = self.parameters[name]
        if hasattr(parameter, "ds_tensor"):
            held = (
                safe_get_local_fp32_param(parameter)
                if kind == "weights"
                else safe_get_local_optimizer_state(parameter, kind)
            )
            assert held is not None
            start, stop = _own_range(parameter)
            return start, held.detach().reshape(-1)[: stop - start]
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        held = mapping.get_hp_fragment(None if kind == "weights" else kind)
        return mapping.lp_fragment_address.start, held.detach().reshape(-1)

    def load(self, source: Source) -> None:
        check_names(self.shapes, source.shapes)
        for name, parameter in self.parameters.items():
            with torch.no_grad():
                _fill(parameter, source, name)  # used in the forward
            self._put(parameter, source, name, "weights")

    def _put(self, parameter: Any, source: Source, name: str, kind: Kind) -> None:
        """Load one tensor.

        In stage 3 a rank loads its part; otherwise DeepSpeed takes its part of the whole.
        """
        if hasattr(parameter, "ds_tensor"):
            part = torch.zeros(parameter.ds_tensor.ds_numel, device=self._network.device)
            start, stop = _own_range(parameter)
            part[: stop - start].copy_(source.range(name, start, stop))
            if kind == "weights":
                safe_set_local_fp32_param(parameter, part)
            else:
                safe_set_local_optimizer_state(parameter, part, kind)
            return
        value = whole(source, name).float().to(self._network.device)
        if kind == "weights":
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, kind)

    def load_moments(self, sources: Mapping[Kind, Source], num_steps: int) -> None:
        inner = self._optimizer.optimizer
        inner.state.clear()
        self.num_steps = num_steps
        if not sources:
            return
        for kind in MOMENTS:
            check_names(self.shapes, sources[kind].shapes)
        for held in self._held_by_optimizer():
            zeros = {kind: torch.zeros_like(held) for kind in MOMENTS}
            inner.state[held] = {
                "step": torch.tensor(float(num_steps), device=held.device),
                **zeros,
            }
        self._link_moments()
        for kind in MOMENTS:
            for name, parameter in self.parameters.items():
                self._put(parameter, sources[kind], name, kind)

    def _link_moments(self) -> None:
        """Link tensors to their moments.

        DeepSpeed does this once, when the first group is stepped: other groups have none then.
        """
        if self._stage != 3:
            self._optimizer._hp_optimizer_states_linked = False
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def _held_by_optimizer(self) -> list[Tensor]:
        if self._stage == 3:  # the optimizer gets them one by one in its step
            return list(self._optimizer.fp32_partitioned_groups_flat)
        return [
            held for group in self._optimizer.optimizer.param_groups for held in group["params"]
        ]

    def close(self) -> None:
        self._engine.destroy()

    def move(self, part: str, device: torch.device) -> None:
        """Move one part between device and host, where DeepSpeed does not.

        Stage 3 moves moments and float32 weights only for an optimizer of its own. Stages 1 and 2
        do not move pending gradients before their step begins.
        """
        there = device == self._network.device
        leaves = part not in self._away and (not there or device.type == "cpu")
        if not leaves and not (part in self._away and there):
            return
        (self._away.add if leaves else self._away.remove)(part)
        if part == "optimizer":
            for state in self._optimizer.optimizer.state.values():
                state.update({kind: placed(state[kind], device) for kind in MOMENTS})
        elif part == "gradients" and self._stage < 3:
            self._move_gradients(device)
        elif leaves:
            self._engine.offload_states(
                self._moved_by_engine[part], OffloadDeviceEnum.cpu, pin_memory=False
            )
        else:
            self._reload(self._moved_by_engine[part])
        if part == "weights" and self._stage == 3:
            for held in self._optimizer.fp32_partitioned_groups_flat:
                held.data = placed(held.data, device)

    def _move_gradients(self, device: torch.device) -> None:
        self.gradients.move(device)
        for kept in (self._optimizer.averaged_gradients, self._optimizer.all_grad_tensors):
            for key, tensors in kept.items():
                if hasattr(tensors, "move_flat_partition"):  # views of one buffer
                    tensors.move_flat_partition(device)
                elif tensors is not None:
                    kept[key] = [
                        None if tensor is None else placed(tensor, device) for tensor in tensors
                    ]

    def _reload(self, kinds: set[Offloaded]) -> None:
        """Bring back only these kinds.

        DeepSpeed reloads all that is offloaded, so the kinds of other parts are hidden from it.
        """
        others = self._optimizer.offloaded_states - kinds
        self._optimizer.offloaded_states -= others
        self._engine.reload_states(non_blocking=False)
        self._optimizer.offloaded_states |= others
