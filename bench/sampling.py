"""Sampled tokens a second through SDK and service, against vLLM's offline LLM.generate with the same engine settings.

Rounds alternate in one run. The prompts, lengths, temperature, dtype, threads, KV bytes and LoRA setting are the same;
both sample the base model and both return logprobs.
"""

import json
import os
import statistics
import subprocess
import sys
import time

import numpy as np
import tinker
from tinker import types

from bench.harness import ROOT, base_folder, emit, service

ROUNDS, PROMPTS, TOKENS = 5, 64, 128


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, 16).tolist() for _ in range(PROMPTS)]


def offline() -> None:
    """The child process: one round for each line on standard input, seconds on standard output."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(base_folder()), dtype="float32", max_model_len=512, max_num_seqs=128, max_num_batched_tokens=4096,
        kv_cache_memory_bytes=128 * 2**20, enforce_eager=True, enable_lora=True, max_loras=4, max_lora_rank=32,
        generation_config="vllm", disable_log_stats=True,
    )  # fmt: skip
    params = SamplingParams(max_tokens=TOKENS, temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False)
    inputs = [{"prompt_token_ids": p} for p in prompts()]
    print("ready", file=sys.__stdout__, flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        engine.generate(inputs, params, use_tqdm=False)
        print(json.dumps(time.perf_counter() - started), file=sys.__stdout__, flush=True)


def start_offline() -> subprocess.Popen[str]:
    environment = {
        **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip
    command = [sys.executable, "-m", "bench.sampling", "offline"]
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert child.stdout is not None
    while "ready" not in (line := child.stdout.readline()):
        if not line:
            raise SystemExit("the offline engine did not start")
    return child


def offline_round(child: subprocess.Popen[str]) -> float:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write("go\n")
    child.stdin.flush()
    while True:
        line = child.stdout.readline().strip()
        if line.replace(".", "", 1).replace("e-", "").isdigit():
            return float(line)


def tokens_per_s(sampler: tinker.SamplingClient, inputs: list[types.ModelInput], params: types.SamplingParams) -> float:
    started = time.perf_counter()
    futures = [sampler.sample(p, 1, params) for p in inputs]
    count = sum(len(f.result().sequences[0].tokens) for f in futures)
    return count / (time.perf_counter() - started)


def main() -> None:
    inputs = [types.ModelInput.from_ints(p) for p in prompts()]
    params = types.SamplingParams(max_tokens=TOKENS, temperature=1.0, stop=[])
    ours, theirs, adapted = [], [], []
    with service("base_model.warmup_steps=0"), tinker.ServiceClient() as client:
        sampler = client.create_sampling_client(base_model="skyrl-actors/tiny").result()
        model = client.create_lora_training_client("skyrl-actors/tiny", rank=8).result()
        with_adapter = model.save_weights_and_get_sampling_client().result()
        child = start_offline()
        try:
            for i in range(ROUNDS + 1):
                rate = tokens_per_s(sampler, inputs, params)
                slower = tokens_per_s(with_adapter, inputs, params)
                other = offline_round(child)
                if i >= 1:
                    ours.append(rate)
                    adapted.append(slower)
                    theirs.append(PROMPTS * TOKENS / other)
        finally:
            child.kill()
            child.wait()
    emit("sampling", {
        "service_tokens_per_s": round(statistics.median(ours)), "offline_tokens_per_s": round(statistics.median(theirs)),
        "lora_tokens_per_s": round(statistics.median(adapted)), "lora_ratio": round(statistics.median(adapted) / statistics.median(ours), 3),
        "service_ratio": round(statistics.median(ours) / statistics.median(theirs), 3),
        "prompts": PROMPTS, "tokens": TOKENS, "rounds": ROUNDS,
    })  # fmt: skip


if __name__ == "__main__":
    offline() if sys.argv[1:] == ["offline"] else main()
