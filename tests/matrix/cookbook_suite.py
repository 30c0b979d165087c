"""The cookbook's own tests and tutorials, unmodified, from its source package.

They want base models of the hosted service. Here a small network has their names, so what they
train or answer means little. They show that every call and file works.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.matrix.cookbook import VERSION, installed, write_rows
from tests.matrix.source_packages import unpacked

SMALL, BASE = "Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B-Base"
TESTS = (
    "tests/weights/test_lifecycle.py",
    "tests/weights/test_partial_lora_lifecycle.py::TestPartialLoraQwen35",
    "tests/third_party/test_litellm.py",
)
TUTORIALS = (
    "101_hello_tinker",
    "103_async_patterns",
    "202_loss_functions",
    "203_completers",
    "204_evaluations",
    "302_custom_environment",
    "303_sft_with_config",
    "304_rl_with_config",
    "402_rl_hyperparams",
    "403_dpo_preferences",
    "404_sequence_extension",
    "405_multi_agent",
    "406_prompt_distillation",
    "501_export_hf",
    "502_lora_adapter",
)
TOOLS = ("marimo==0.25.2", "litellm==1.110.2")  # tutorials are notebooks of the first
# Tokens that the cookbook's renderer for these models needs.
RENDERED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CONTEXT = 4096
GSM8K = "---\nconfigs:\n- config_name: main\n  data_files:\n" + "".join(
    f"  - split: {split}\n    path: main/{split}.jsonl\n" for split in ("train", "test")
)


def make_base(tiny: Path, folder: Path) -> None:
    """Write the tiny model with a head of its own, a longer context and the renderer's tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny, dtype="float32")
    model.config.tie_word_embeddings = False
    model.config.max_position_embeddings = CONTEXT
    model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.add_tokens(list(RENDERED))
    assert len(tokenizer) <= model.config.vocab_size
    tokenizer.save_pretrained(folder)


def prepare(work: Path, tiny: Path) -> None:
    """Create the names of the hub that tests and tutorials use, as folders below `work`."""
    make_base(tiny, work / SMALL)
    (work / BASE).symlink_to(work / SMALL)
    for name in ("tests", "tutorials", "pyproject.toml"):
        there = unpacked("tinker-cookbook", VERSION) / name
        (shutil.copytree if there.is_dir() else shutil.copy)(there, work / name)
    chats = [_chat(i) for i in range(64)]
    write_rows(work / "allenai/tulu-3-sft-mixture/train.jsonl", chats)
    sums = work / "openai/gsm8k"
    for split in ("train", "test"):
        rows = [{"question": f"{i % 5} + {4 - i % 5}?", "answer": "#### 4"} for i in range(1024)]
        write_rows(sums / "main" / f"{split}.jsonl", rows)
    (sums / "README.md").write_text(GSM8K + "---\n")


def _chat(i: int) -> dict[str, object]:
    asked = {"role": "user", "content": f"What is {i % 5} + {4 - i % 5}?"}
    return {"messages": [asked, {"role": "assistant", "content": "It is 4."}]}


def service_config(work: Path) -> str:
    """Return the YAML of a service with these base models."""
    names = {"small": SMALL, "base": BASE}
    served = {
        label: {"base_model": {"type": "pretrained", "name": name, "path": str(work / SMALL)}}
        for label, name in names.items()
    }
    engine = {"max_model_len": CONTEXT, "max_num_batched_tokens": CONTEXT, "max_num_seqs": 64}
    keys = {
        "extends": "configs/base.yaml",
        "base_models": served,
        "policy": {"num_threads": 2},
        "critic": None,
        "engine": {**engine, "dtype": "float32", "kv_cache_bytes": 2**29},
        "lora": {"max_rank": 64},
        "transfer": {"type": "shm"},
        "parking": {"max_resident": 1},
    }
    return json.dumps(keys)  # JSON is YAML


def ran(work: Path, url: str, command: list[str], timeout_s: float) -> tuple[int, str, float]:
    """Run a command of the suite. Return its exit status, its output and its seconds."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(installed(TOOLS)),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "huggingface"),
        "TINKER_TELEMETRY": "0",
        "TINKER_COOKBOOK_RUNS_DIR": str(work / "runs"),
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": "tml-local",
        "TOKENIZERS_PARALLELISM": "false",
    }
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *command],
        cwd=work,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    return done.returncode, done.stdout, time.perf_counter() - start
