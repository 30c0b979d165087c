"""The Tinker cookbook reads our adapter files, and its merged model equals ours."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.matrix.cookbook import installed
from tests.workers.test_adapter_families import worker_for
from tests.workers.tiny_models import make

BUILD = """
import sys
from tinker_cookbook.weights import build_hf_model, build_lora_adapter
base, adapter, peft, merged = sys.argv[1:]
build_lora_adapter(base_model=base, adapter_path=adapter, output_path=peft)
build_hf_model(base_model=base, adapter_path=adapter, output_path=merged)
"""


@pytest.fixture(scope="module")
def cookbook() -> Path:
    return installed()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-untied", "qwen3-moe", "nemotron-h-moe", "gpt-oss"])
def test_the_cookbook_reads_adapters_and_merges_them_to_the_same_model(
    name: str, tmp_path: Path, cookbook: Path
):
    base = make(name, tmp_path / "base")
    worker = worker_for(base, "shared_outer")
    worker.save_checkpoint("a", str(tmp_path / "a"), "weights", "r1")
    worker.save_checkpoint("a", str(tmp_path / "ours"), "merged", "r2")
    folders = [str(folder) for folder in (base, *(tmp_path / n for n in ("a", "peft", "theirs")))]
    subprocess.run(
        [sys.executable, "-c", BUILD, *folders],
        env={**os.environ, "PYTHONPATH": str(cookbook)},
        check=True,
        timeout=120,
    )
    assert (tmp_path / "peft" / "adapter_model.safetensors").is_file()
    tokens = torch.arange(2, 30)[None]
    with torch.no_grad():
        ours, theirs = (
            AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32)(
                tokens
            ).logits
            for folder in ("ours", "theirs")
        )
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
