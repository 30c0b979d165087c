"""Live updates of models that copy weights into parameters by hand.

During an update, vLLM's parameters have no memory until all weights of their layer have arrived.
vLLM counts and keeps what arrives in the parameters' `weight_loader`. A model that copies instead
(gpt-oss: experts and attention sinks) would keep its old weights. Here such a copy of a whole
parameter becomes a call of its `weight_loader`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode
from vllm.model_executor.model_loader.reload.layerwise import make_online_process_loader
from vllm.model_executor.model_loader.reload.meta import CopyCounter
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

COPY: Any = torch.Tensor.copy_
DATA: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class HandCopies(TorchFunctionMode):
    """Load what is copied into parameters of a model that has an update, inside `with`."""

    def __init__(self, model: nn.Module):
        super().__init__()
        # The parameters are kept, so that no other tensor gets the id of one.
        self._waiting = {
            id(parameter): (parameter, layer, name)
            for layer in model.modules()
            for name, parameter in layer.named_parameters(recurse=False)
            if parameter.is_meta
        }

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func not in (COPY, DATA) or id(args[0]) not in self._waiting or _is_counting():
            return func(*args, **(kwargs or {}))
        parameter, layer, name = self._waiting[id(args[0])]
        if func is COPY:
            parameter.weight_loader = default_weight_loader  # type: ignore[attr-defined]
            make_online_process_loader(layer, name)(parameter, args[1])
        return parameter


def _is_counting() -> bool:
    """Return whether a `weight_loader` runs to count what it copies."""
    return isinstance(_get_current_dispatch_mode(), CopyCounter)
