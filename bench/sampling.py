"""Sampled tokens per second through SDK and service, and with vLLM's offline LLM.generate.

Both have the same engine settings. Rounds alternate in one run, and the order of the two and of the
loads rotates, because the earlier work heats the machine. Prompts, lengths, temperature, dtype,
threads, KV bytes and the LoRA setting are the same. Both sample the base model, return logprobs and
use a separate seed for each sample, as the service always does. Three loads have 64 sequences each:

- `service_ratio`: one sample of 384 tokens for each of 64 prompts;
- `group_ratio`: groups of 8 samples for each of 8 prompts, as in RL;
- `short_ratio`: 64 short samples of 128 tokens, in which the cost of a request weighs most.

The baseline has two layouts. `offline` has the same vLLM processes as the service's engine: a
separate process for the core, which is vLLM's default, and the model in the core. The ratios above
use it. `in_process` has the core in the caller's process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`). A
program that answers requests during generation cannot have this layout. Its ratios are
`in_process_*_ratio`, and include the loss of vLLM between its processes (`layout_ratio`).
"""

import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import psutil
import tinker
from rich.progress import track
from tinker import types

from bench.harness import ROOT, base_folder, emit, service

ROUNDS, SEQUENCES = 9, 64
TOKENS, SHORT, GROUP = 384, 128, 8
# samples per prompt, tokens per sample
LOADS = {
    "service": (1, TOKENS),
    "group": (GROUP, TOKENS),
    "short": (1, SHORT),
}
BASELINES = ("offline", "in_process")


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, 16).tolist() for _ in range(SEQUENCES)]


def offline(layout: str) -> None:
    """Run the child process: one round for each input line, with the seconds as output."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.llm_engine import LLMEngine

    if layout == "offline":
        # vLLM's variable for this would also start a worker process, which the service's engine
        # does not have.
        LLMEngine.from_engine_args = functools.partial(
            LLMEngine.from_engine_args, enable_multiprocessing=True
        )
    engine = LLM(
        str(base_folder()),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=128,
        max_num_batched_tokens=4096,
        kv_cache_memory_bytes=128 * 2**20,
        enforce_eager=True,
        enable_lora=True,
        max_loras=4,
        max_lora_rank=32,
        generation_config="vllm",
        disable_log_stats=True,
    )
    inputs = [{"prompt_token_ids": p} for p in prompts()]
    print("ready", file=sys.__stdout__, flush=True)
    for line in sys.stdin:
        group, tokens = map(int, line.split())
        params = [
            SamplingParams(
                n=group,
                max_tokens=tokens,
                temperature=1.0,
                seed=i,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for i in range(SEQUENCES // group)
        ]
        started = time.perf_counter()
        engine.generate(inputs[: SEQUENCES // group], params, use_tqdm=False)
        print(json.dumps(time.perf_counter() - started), file=sys.__stdout__, flush=True)


def start_offline(layout: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [sys.executable, "-m", "bench.sampling", layout]
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


def end(child: subprocess.Popen[str]) -> None:
    """Stop the child and vLLM's core, which would outlive it."""
    below = psutil.Process(child.pid).children(recursive=True)
    child.kill()
    for process in below:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    child.wait()
    psutil.wait_procs(below, timeout=10)


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


def measure(
    sampler: tinker.SamplingClient, adapted: tinker.SamplingClient
) -> dict[str, dict[str, list[float]]]:
    """Return tokens per second of each round, by way and load."""
    rates: dict[str, dict[str, list[float]]] = {
        name: defaultdict(list) for name in ("service", *BASELINES)
    }
    children = {name: start_offline(name) for name in BASELINES}
    runs: dict[str, Callable[[int, int], float]] = {
        "service": functools.partial(service_round, sampler)
    }
    runs |= {name: functools.partial(offline_round, child) for name, child in children.items()}
    try:
        for i in range(ROUNDS + 1):  # the first round is a warm-up
            for load in track(
                turned([*LOADS, "lora"], i // len(runs)), description=f"round {i} of {ROUNDS}"
            ):
                if load == "lora":
                    rates["service"][load].append(service_round(adapted, *LOADS["service"]))
                    continue
                for name in turned(list(runs), i):
                    rates[name][load].append(runs[name](*LOADS[load]))
    finally:
        for child in children.values():
            end(child)
    return {name: {load: values[1:] for load, values in of.items()} for name, of in rates.items()}


def turned(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Return the median of the rounds' ratios.

    The speed of the machine drifts less within a round than over all rounds.
    """
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3)


def main() -> None:
    with service("base_model.warmup_steps=0"), tinker.ServiceClient() as client:
        sampler = client.create_sampling_client(base_model="skyrl-actors/tiny").result()
        model = client.create_lora_training_client("skyrl-actors/tiny", rank=8).result()
        rates = measure(sampler, model.save_weights_and_get_sampling_client().result())
    ours, apart, inside = rates["service"], rates["offline"], rates["in_process"]
    emit(
        "sampling",
        {
            **{
                f"{load}_tokens_per_s": round(statistics.median(values))
                for load, values in ours.items()
            },
            **{
                f"{name}_{load}_tokens_per_s": round(statistics.median(rates[name][load]))
                for name in BASELINES
                for load in LOADS
            },
            **{f"{load}_ratio": ratio(ours[load], apart[load]) for load in LOADS},
            **{
                f"{load}_ratios": [
                    round(a / b, 3) for a, b in zip(ours[load], apart[load], strict=True)
                ]
                for load in LOADS
            },
            **{f"in_process_{load}_ratio": ratio(ours[load], inside[load]) for load in LOADS},
            "layout_ratio": ratio(apart["service"], inside["service"]),
            "lora_ratio": ratio(ours["lora"], ours["service"]),
            "sequences": SEQUENCES,
            "group": GROUP,
            "tokens": TOKENS,
            "short_tokens": SHORT,
            "rounds": ROUNDS,
        },
    )


if __name__ == "__main__":
    offline(sys.argv[1]) if sys.argv[1:] else main()
