"""A second device for tests, `torch.device("mtia")`, whose memory is host memory.

torch treats it as it treats a GPU: tensors are on it or on the CPU, an operator refuses a mixture,
and backward passes run on its own thread. So a tensor that is left on the host, or on the device,
is an error. Results equal those of the CPU. Needs a C++ compiler; the first build takes a minute.
"""

from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAME = "mtia"  # torch knows the name, and has no backend for it
# They take tensors of two devices by design.
BRIDGES = {
    "aten::copy_",
    "aten::_to_copy",
    "aten::_copy_from",
    "aten::set_",
    "aten::is_pinned",
}


def registered() -> torch.device:
    """Build the device, and give torch's `mtia` module what it needs. Call it before other imports.

    torch decides once, at the first question, whether the device exists.
    """
    built: Any = cpp_extension.load(
        name="second_device",
        sources=[str(Path(__file__).with_name("device.cpp"))],
        extra_cflags=["-O0", "-w"],
    )
    functions: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "manual_seed_all": lambda seed: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: built.allocated(),
    }
    module = torch.get_device_module(NAME)
    for name, function in functions.items():
        setattr(module, name, function)
    return torch.device(NAME, 0)


class NoMixtures(TorchDispatchMode):
    """Refuse operators over tensors of both devices, as CUDA does. Numbers of the host are fine."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func._schema.name not in BRIDGES:
            tensors = [x for x in tree_leaves((args, given)) if isinstance(x, torch.Tensor)]
            found = {x.device.type for x in tensors if x.dim()}
            if len(found) > 1:
                raise RuntimeError(f"{func} got tensors on {' and '.join(sorted(found))}")
        return func(*args, **given)
