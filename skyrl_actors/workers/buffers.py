"""Constants of a model that its files hold beside the weights, for example corrections of routers.

They are buffers of the modules. Training does not change them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from skyrl_actors.workers.tensor_files import Source, whole


def stored_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong to a model's files, by name."""
    return {
        f"{place}.{name}" if place else name: buffer
        for place, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    }


def fill_buffers(module: Any, source: Source) -> None:
    """Set these buffers to what a model's files hold.

    Some stay in float32 in any compute dtype, as when transformers loads the model.
    """
    wide = [
        *(getattr(module, "_keep_in_fp32_modules", None) or ()),
        *(getattr(module, "_keep_in_fp32_modules_strict", None) or ()),
    ]
    for name, buffer in stored_buffers(module).items():
        place, _, own = name.rpartition(".")
        dtype = torch.float32 if any(part in name for part in wide) else buffer.dtype
        value = whole(source, name).to(buffer.device, dtype)
        module.get_submodule(place)._buffers[own] = value
