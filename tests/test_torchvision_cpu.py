"""torchvision beside a torch for CPUs: importable in every process of the environment."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from skyrl_actors import torchvision_cpu

WITHOUT_HOOK = "import sys; sys.meta_path = [f for f in sys.meta_path if f.__module__ != {name!r}]"
PROGRAM = """
import torchvision, torch
from torchvision.transforms.v2 import functional
from transformers import AutoImageProcessor
assert functional.resize(torch.zeros(3, 8, 8, dtype=torch.uint8), [4, 4]).shape == (3, 4, 4)
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


@pytest.mark.skipif(torch.version.cuda is not None, reason="a torch for GPUs has its torchvision")
def test_torchvision_imports_only_by_the_hook():
    without = WITHOUT_HOOK.replace("f.__module__", "getattr(f, '__module__', '')")
    failed = run(without.format(name=torchvision_cpu.__name__) + PROGRAM)
    assert "torchvision::nms does not exist" in failed.stderr
    done = run(PROGRAM)
    assert done.returncode == 0, done.stderr


def test_the_hook_is_one_line_that_other_environments_survive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    torchvision_cpu.write_hook()
    (line,) = (tmp_path / torchvision_cpu.HOOK).read_text().splitlines()
    isolated = [sys.executable, "-S", "-c", line]  # without the packages of the environment
    done = subprocess.run(isolated, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr
    shown = f"print({torchvision_cpu.__name__!r} in sys.modules)"
    found = run(f"import sys\n{line}\n{shown}")
    assert found.stdout.strip() == "True"


def test_the_hook_survives_a_release_without_this_module(tmp_path: Path):
    (tmp_path / "skyrl_actors").mkdir()
    isolated = [sys.executable, "-S", "-c", torchvision_cpu.LINE]
    done = subprocess.run(isolated, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr


def test_torchvision_can_be_imported_again():
    again = "import sys\nfor n in [n for n in sys.modules if n.startswith('torchvision')]:\n"
    done = run(
        f"import torchvision\n{again}    del sys.modules[n]\ntry:\n    import torchvision\n"
        "except ImportError:\n    pass\n"
    )
    assert done.returncode == 0, done.stderr


def test_other_imports_are_left_to_other_finders():
    assert torchvision_cpu.Finder.find_spec("torch") is None
