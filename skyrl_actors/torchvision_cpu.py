"""Make torchvision importable beside a torch for CPUs. vLLM's classes with a vision tower need it.

PyPI's torchvision is compiled for CUDA. Beside a CPU build of torch its operators do not load, and
its import fails because it adds to operators that are not declared. Declaring them is enough:
resizing and normalising do not use them, and a call of one of them raises torchvision's own error.

`write_hook` adds a file to the environment, so that each of its processes declares them when it
imports torchvision.
"""

import sys
from typing import Any

NAME = "torchvision"
OPERATORS = (
    *("nms", "qnms", "roi_align", "qroi_align", "roi_pool", "ps_roi_align", "ps_roi_pool"),
    *("_roi_align_backward", "_roi_pool_backward", "_ps_roi_align_backward"),
    *("_ps_roi_pool_backward", "deform_conv2d", "_deform_conv2d_backward"),
)
HOOK = "skyrl_actors_torchvision.pth"
# Each start of Python runs this line, also after skyrl_actors was removed or replaced.
LINE = (
    "import importlib.util as u; u.find_spec('skyrl_actors') and "
    f"u.find_spec('{__name__}') and __import__('{__name__}')\n"
)
_declared: list[object] = []  # torch drops a declaration with its object


class Finder:
    """A finder of torchvision alone. It imports what it needs when torchvision is imported."""

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: Any = None) -> Any:
        """Return torchvision's spec with a loader that declares its operators first."""
        if fullname != NAME:
            return None
        from importlib.machinery import PathFinder, SourceFileLoader
        from importlib.util import spec_from_file_location

        class Loader(SourceFileLoader):
            def exec_module(self, module: Any) -> None:
                declare(self.path)
                super().exec_module(module)

        found = PathFinder.find_spec(fullname, path, target)
        if found is None or found.origin is None:
            return None
        return spec_from_file_location(NAME, found.origin, loader=Loader(NAME, found.origin))


def declare(origin: str) -> None:
    """Declare the operators of the torchvision at `origin`, unless they can be loaded."""
    from pathlib import Path

    import torch

    if _declared:  # an earlier import failed later on
        return
    try:
        torch.ops.load_library(next(Path(origin).parent.glob("_C*")))
    except (OSError, RuntimeError, StopIteration):
        library = torch.library.Library(NAME, "DEF")
        _declared.append(library)
        for name in OPERATORS:
            library.define(f"{name}(Tensor input) -> Tensor")


def write_hook() -> None:
    """Add the file that imports this module at each start of this environment's Python."""
    import sysconfig
    from pathlib import Path

    (Path(sysconfig.get_path("purelib")) / HOOK).write_text(LINE)


if Finder not in sys.meta_path:
    sys.meta_path.insert(0, Finder)
