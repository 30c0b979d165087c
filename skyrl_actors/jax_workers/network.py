"""A base model whose passes are JAX programs, with the interface of the torch network.

To torch it is one differentiable function of the models' tensors. So the losses, the optimizers,
checkpoints and all that surrounds a pass are the same code for both.
"""

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor

from skyrl_actors.jax_workers.architecture import Architecture
from skyrl_actors.jax_workers.arrays import Devices
from skyrl_actors.jax_workers.decoder import layer_names
from skyrl_actors.jax_workers.executables import ExecutableFiles, form_of
from skyrl_actors.jax_workers.passes import JaxPass, Views, predict
from skyrl_actors.jax_workers.plans import plan_passes
from skyrl_actors.jax_workers.programs import Adapter, Base, Programs
from skyrl_actors.jax_workers.weights import Form, Read, adapter_of, base_of, names_of
from skyrl_actors.workers.interface import Activations
from skyrl_actors.workers.network import Network, PassInputs
from skyrl_actors.workers.packing import Pass

DEFAULT_ADAPTERS = 8  # on the device at once


class JaxNetwork(Network):
    """The frozen base of adapters; a full fine-tune brings all weights with its rows."""

    def __init__(
        self,
        module: Any,
        arch: Architecture,
        read: Read,
        dtype: torch.dtype,
        activations: Activations,
        devices: Devices,
        cache: Path | None = None,
    ):
        """`module` is the torch model on the meta device: it gives names, and computes nothing.

        Compiled programs are kept in the folder `cache`.
        """
        names = [name for name, _ in module.named_parameters()]
        biased = any(name.endswith("q_proj.bias") for name in names)
        self.names = names_of(arch, names, layer_names(arch, biased))
        super().__init__(module, torch.device("cpu"), "keep")
        self.arch, self.dtype, self.devices = arch, dtype, devices
        self.base = base_of(self.names, names, read, dtype, devices)
        recompute = activations == "recompute"
        folder = cache if devices.keeps_programs else None
        self.files = ExecutableFiles(folder, arch, recompute, devices, form_of(self.base))
        self.programs = Programs(arch, recompute, devices, self.files)
        self.max_adapters = DEFAULT_ADAPTERS
        self._lent: Base | None = None  # arrays of another network, which are not freed here
        # Least recently used first. Without a form: weights of a full fine-tune.
        self._cache: OrderedDict[tuple[int, Form | None], _Cached] = OrderedDict()
        self._caching = threading.RLock()  # several threads compile programs at the start

    def plan(self, parts: Sequence[tuple[Sequence[int], np.ndarray]], budget: int) -> list[Pass]:
        return plan_passes(parts, budget)

    def predict(self, inputs: PassInputs) -> tuple[Tensor, Tensor | None]:
        return predict(JaxPass(self, inputs, torch.is_grad_enabled()))

    def adapter(self, form: Form, views: Views) -> Adapter:
        """Return an adapter on the device, made once for each version of its tensors."""
        return self._made(views, form, lambda: adapter_of(self.arch, form, views, self.devices))

    def weights(self, views: Views) -> Base:
        """Return the weights of a full fine-tune on the device."""

        def read(name: str) -> Tensor:
            return views[name].detach().clone()  # the next step changes the tensors in place

        return self._made(
            views, None, lambda: base_of(self.names, list(views), read, self.dtype, self.devices)
        )

    def _made(self, views: Views, form: Form | None, make: Callable[[], Any]) -> Any:
        version = tuple(view._version for view in views.values())
        with self._caching:
            held = self._cache.get((id(views), form))
            if held is None or held.views is not views or held.version != version:
                held = self._cache[id(views), form] = _Cached(views, version, make())
            self._cache.move_to_end((id(views), form))
            adapters = [key for key in self._cache if key[1] is not None]
            for key in adapters[: -(self.max_adapters + 1)]:  # one is the empty place
                del self._cache[key]
            return held.arrays

    def beside(self, max_adapters: int) -> "JaxNetwork":
        """Return a network with the arrays of this base, and with adapters of its own.

        The two may get different weights later. Each is used by one thread at a time.
        """
        other = copy.copy(self)
        other._lent, other._cache, other.max_adapters = self.base, OrderedDict(), max_adapters
        return other

    def borrow_again(self) -> bool:
        """Take the arrays of the other network again; return whether there is one."""
        if self._lent is None:
            return False
        self.base = self._lent
        return True

    def free_base(self) -> int:
        """Free the weights and return their bytes; a pass needs new ones first.

        Arrays of another network stay.
        """
        if self.base is self._lent:
            return 0
        freed = sum(array.nbytes for array in jax.tree.leaves(self.base))
        for array in jax.tree.leaves(self.base):
            array.delete()
        return freed

    def forget(self, views: Views) -> None:
        """Free the arrays of a deleted model."""
        with self._caching:
            for key in [key for key in self._cache if key[0] == id(views)]:
                del self._cache[key]


@dataclass
class _Cached:
    views: Views
    version: tuple[int, ...]  # of each tensor
    arrays: Any
