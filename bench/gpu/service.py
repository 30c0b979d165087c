"""Sampling through a whole service against vLLM alone, and recovery of its parts.

`bench/gpu/run.sh` runs it. The service is the one that `skyrl-actors serve MODEL` starts, for a
model with random weights. vLLM alone runs before it, with the engine settings of its config.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch
from tinker import types

from bench.faults import kill
from bench.gpu.engines import make_base
from bench.harness import NAME, ROOT, cli, service

ROUNDS, PROMPT = 3, 16
KINDS = ("rank", "engine actor", "controller")


def prompts(count: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(0, 256, (count, PROMPT)).tolist()


def alone(config: Path, folder: str, count: int, tokens: int) -> None:
    """Print tokens per second of vLLM's offline LLM with the engine settings of the config."""
    from vllm import LLM, SamplingParams

    from skyrl_actors.config.load import load

    engine = load(config).engine
    llm = LLM(
        folder,
        dtype=engine.dtype,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        kv_cache_memory_bytes=engine.kv_cache_bytes,
        enforce_eager=engine.enforce_eager,
        enable_lora=True,
        max_loras=engine.max_loras,
        max_lora_rank=32,
        generation_config="vllm",
    )
    inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts(count)]
    rates = []
    for _ in range(ROUNDS + 1):
        params = [
            SamplingParams(max_tokens=tokens, seed=i, ignore_eos=True, logprobs=0, detokenize=False)
            for i in range(count)
        ]
        started = time.perf_counter()
        llm.generate(inputs, params, use_tqdm=False)
        rates.append(count * tokens / (time.perf_counter() - started))
    print(f"rate {statistics.median(rates[1:])}")


def rate_alone(config: Path, folder: Path, count: int, tokens: int) -> float:
    """Run `alone` in a process that gives its memory back."""
    command = [sys.executable, "-m", "bench.gpu.service", "--alone"]
    command += [str(config), str(folder), str(count), str(tokens)]
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("rate ")]
    if done.returncode or not lines:
        raise SystemExit(f"vLLM alone failed:\n{done.stderr[-2000:]}")
    return float(lines[0].split()[1])


def rate_served(sampler: tinker.SamplingClient, count: int, tokens: int) -> float:
    params = types.SamplingParams(max_tokens=tokens, temperature=1.0, stop=[])
    rates = []
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        futures = [sampler.sample(types.ModelInput.from_ints(p), 1, params) for p in prompts(count)]
        total = sum(len(f.result().sequences[0].tokens) for f in futures)
        rates.append(total / (time.perf_counter() - started))
    return statistics.median(rates[1:])


def kills(client: tinker.ServiceClient, base: str) -> dict[str, Any]:
    """Kill parts with SIGKILL; return the seconds to the next answer, and how it differs."""
    trained = client.create_lora_training_client(base, rank=8, seed=0).result()
    row = prompts(1)[0]
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(row[:-1]),
        loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * (PROMPT - 1)},  # type: ignore[arg-type]
    )
    for _ in range(2):
        trained.forward_backward([datum], "cross_entropy").result()
        trained.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    sampler = trained.save_weights_and_get_sampling_client()
    greedy = types.SamplingParams(max_tokens=8, temperature=0.0)

    def answer() -> np.ndarray:
        scored = trained.forward([datum], "cross_entropy").result().loss_fn_outputs[0]
        drawn = sampler.sample(types.ModelInput.from_ints(row), 1, greedy).result().sequences[0]
        return np.concatenate([scored["logprobs"].data, drawn.tokens, drawn.logprobs or []])

    expected, found, changed = answer(), dict[str, float](), 0.0
    for kind in KINDS:
        if not kill(NAME, kind, random.Random(0)):
            continue
        started = time.perf_counter()
        again = answer()
        found[kind] = round(time.perf_counter() - started, 1)
        changed = max(changed, float(np.abs(again - expected).max()))
    return {"killed": found, "changed_by_kills": changed}


def measured(tiny: bool) -> dict[str, Any]:
    shape, count, tokens = ("tiny", 8, 32) if tiny else ("4B", 128, 256)
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as scratch:
        folder, config = Path(scratch) / shape, Path(scratch) / "service.yaml"
        dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        make_base(shape, folder, dtype)
        own = (
            f"checkpoint_dir={scratch}/checkpoints",
            "engine.max_model_len=512",
        )
        cli("plan", str(folder), "--write", str(config), *own)
        theirs = rate_alone(config, folder, count, tokens)
        with service(*own, config=str(config)), tinker.ServiceClient() as client:
            ours = rate_served(client.create_sampling_client(base_model=shape), count, tokens)
            found = kills(client, shape)
    return {
        "sampling_ratio": round(ours / theirs, 3),
        "sampled_tokens_per_s": round(ours),
        **found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a small shape, on any machine")
    parser.add_argument("--alone", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        config, folder, count, tokens = options.alone
        alone(Path(config), folder, int(count), int(tokens))
        return
    print(json.dumps({"bench": "gpu_service", **measured(options.tiny)}))


if __name__ == "__main__":
    main()
