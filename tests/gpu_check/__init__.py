"""What a machine without a GPU can prove about the GPU paths, with the CUDA builds.

`make gpu-check` runs these tests in an environment of its own. With the CPU builds they are
skipped.
"""

import pytest
import torch

NEEDS_CUDA_BUILD = pytest.mark.skipif(
    torch.version.cuda is None, reason="needs the CUDA builds: make gpu-check"
)
