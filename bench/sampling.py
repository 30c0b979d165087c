"""Sampled tokens a second through SDK and service, against vLLM's offline LLM.generate with the same engine settings.

Rounds alternate in one run. The prompts, lengths, temperature, dtype, threads, KV bytes and LoRA setting are the same;
both sample the base model, both return logprobs, and both draw each sample from a seed of its own, as the service does always. Three loads of 64 sequences: one sample of 384 tokens for each of 64
prompts (`service_ratio`), groups of 8 samples for each of 8 prompts, as RL draws them (`group_ratio`), and 64 short samples of 128
tokens, where what a request costs by itself weighs most (`short_ratio`).
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

ROUNDS, SEQUENCES = 5, 64
TOKENS, SHORT, GROUP = 384, 128, 8
LOADS = {"service": (1, TOKENS), "group": (GROUP, TOKENS), "short": (1, SHORT)}  # samples of a prompt, tokens of a sample


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, 16).tolist() for _ in range(SEQUENCES)]


def offline() -> None:
    """The child process: one round for each line on standard input, seconds on standard output."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = LLM(
        str(base_folder()), dtype="float32", max_model_len=512, max_num_seqs=128, max_num_batched_tokens=4096,
        kv_cache_memory_bytes=128 * 2**20, enforce_eager=True, enable_lora=True, max_loras=4, max_lora_rank=32,
        generation_config="vllm", disable_log_stats=True,
    )  # fmt: skip
    inputs = [{"prompt_token_ids": p} for p in prompts()]
    print("ready", file=sys.__stdout__, flush=True)
    for line in sys.stdin:
        group, tokens = map(int, line.split())
        params = [
            SamplingParams(
                n=group, max_tokens=tokens, temperature=1.0, seed=i, ignore_eos=True, logprobs=0, detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for i in range(SEQUENCES // group)
        ]  # fmt: skip
        started = time.perf_counter()
        engine.generate(inputs[: SEQUENCES // group], params, use_tqdm=False)
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


def offline_round(child: subprocess.Popen[str], group: int, tokens: int) -> float:
    """Tokens a second."""
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(f"{group} {tokens}\n")
    child.stdin.flush()
    while True:
        line = child.stdout.readline().strip()
        if line.replace(".", "", 1).replace("e-", "").isdigit():
            return SEQUENCES * tokens / float(line)


def service_round(sampler: tinker.SamplingClient, group: int, tokens: int) -> float:
    """Tokens a second."""
    params = types.SamplingParams(max_tokens=tokens, temperature=1.0, stop=[])
    inputs = [types.ModelInput.from_ints(p) for p in prompts()[: SEQUENCES // group]]
    started = time.perf_counter()
    futures = [sampler.sample(p, group, params) for p in inputs]
    count = sum(len(sequence.tokens) for f in futures for sequence in f.result().sequences)
    assert count == SEQUENCES * tokens
    return count / (time.perf_counter() - started)


def main() -> None:
    ours: dict[str, list[float]] = {name: [] for name in (*LOADS, "lora")}
    theirs: dict[str, list[float]] = {name: [] for name in LOADS}
    with service("base_model.warmup_steps=0"), tinker.ServiceClient() as client:
        sampler = client.create_sampling_client(base_model="skyrl-actors/tiny").result()
        model = client.create_lora_training_client("skyrl-actors/tiny", rank=8).result()
        with_adapter = model.save_weights_and_get_sampling_client().result()
        child = start_offline()
        try:
            for i in range(ROUNDS + 1):  # the first one warms up
                for name, load in LOADS.items():
                    here, there = service_round(sampler, *load), offline_round(child, *load)
                    if i:
                        ours[name].append(here)
                        theirs[name].append(there)
                adapted = service_round(with_adapter, *LOADS["service"])
                if i:
                    ours["lora"].append(adapted)
        finally:
            child.kill()
            child.wait()
    median = {name: statistics.median(values) for name, values in ours.items()}
    offline_median = {name: statistics.median(values) for name, values in theirs.items()}
    emit("sampling", {
        **{f"{name}_tokens_per_s": round(rate) for name, rate in median.items()},
        **{f"offline_{name}_tokens_per_s": round(rate) for name, rate in offline_median.items()},
        **{f"{name}_ratio": round(median[name] / offline_median[name], 3) for name in LOADS},
        "lora_ratio": round(median["lora"] / median["service"], 3),
        "sequences": SEQUENCES, "group": GROUP, "tokens": TOKENS, "short_tokens": SHORT, "rounds": ROUNDS,
    })  # fmt: skip


if __name__ == "__main__":
    offline() if sys.argv[1:] == ["offline"] else main()
