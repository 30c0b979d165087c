"""Tokens a second of a JAX engine beside a vLLM engine, on the CPU, without Ray.

    python -m bench.jax_engine [--rounds N] [--samples N] [--tokens N]

Both serve the tiny base in float32, with two threads, in processes of their own, in turns: prompts
of 16 tokens, half of the samples with the base and half with an adapter. A first round warms up;
its seconds include what JAX compiles. Prints a table of medians, and one JSON line.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import ROOT, base_folder, emit

KINDS = ("vllm", "jax")


def spec_of(kind: Any, folder: str) -> Any:
    from skyrl_actors.engines.interface import EngineSpec

    return EngineSpec(
        name=kind,
        base_folder=folder,
        type=kind,
        device="cpu",
        dtype="float32",
        max_model_len=512,
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        kv_cache_bytes=128 * 2**20,
        max_loras=4,
        max_lora_rank=32,
        max_adapters=8,
        enforce_eager=True,
        call_timeout_s=600.0,
    )


def adapter_in(folder: str, work: str) -> Any:
    """Write a random adapter as a trainer does, and return its manifest."""
    from skyrl_actors.messages.model import LoraSpec, ModelSpec
    from skyrl_actors.workers.interface import WorkerSpec
    from skyrl_actors.workers.torch_worker import TorchWorker

    worker = TorchWorker(
        WorkerSpec(
            role="policy",
            rank=0,
            world_size=1,
            base_folder=folder,
            dtype="float32",
            device="cpu",
            num_threads=1,
            microbatch_tokens=512,
            collective_timeout_s=60.0,
        )
    )
    worker.setup("127.0.0.1", 0)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny", lora=LoraSpec(rank=32)))
    return worker.export_weights("m", f"{work}/m@1", "m@1", True)


async def serve(kind: str, folder: str, work: str) -> None:
    """Sample when a line of standard input asks for it, and print the seconds."""
    from skyrl_actors.engines.actor import engine_of
    from skyrl_actors.engines.interface import BASE_VERSION
    from skyrl_actors.messages.requests import SamplingParams

    engine = engine_of(spec_of(kind, folder))
    manifest = adapter_in(folder, work)
    await engine.start()
    print("ready", flush=True)
    rng, loop, number = np.random.default_rng(0), asyncio.get_running_loop(), 0
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        samples, tokens = json.loads(line)
        params = SamplingParams(max_tokens=tokens, seed=number, stop=())
        began = time.perf_counter()
        calls = []
        for i in range(samples):
            number += 1
            prompt = tuple(rng.integers(0, 256, 16).tolist())
            with_adapter = manifest if i % 2 else None
            version = manifest.version if i % 2 else BASE_VERSION
            calls.append(engine.sample(str(number), prompt, params, with_adapter, version))
        for output in await asyncio.gather(*calls):
            assert len(output.sequences[0].tokens) == tokens
        print(json.dumps(time.perf_counter() - began), flush=True)
    await engine.stop()


def started(kind: str, work: str) -> subprocess.Popen[str]:
    from skyrl_actors.backends.actor_env import actor_environment
    from skyrl_actors.config.cluster import ClusterConfig

    own = {"OMP_NUM_THREADS": "2", "NPROC": "2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "bench.jax_engine", "--serve", kind, "--work", work]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **actor_environment(ClusterConfig()), **own},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def answer(process: subprocess.Popen[str]) -> str:
    """Return the next line that the process prints as an answer."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ready") or line[:1].isdigit():
            return line
    raise SystemExit("an engine ended; see its log")


def measured(samples: int, tokens: int, rounds: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as work:
        processes = {}
        for kind in KINDS:
            Path(work, kind).mkdir()
            processes[kind] = started(kind, f"{work}/{kind}")
            answer(processes[kind])
        found: dict[str, list[float]] = {kind: [] for kind in KINDS}
        try:
            for _ in range(rounds + 1):
                for kind, process in processes.items():
                    assert process.stdin is not None
                    process.stdin.write(f"{json.dumps([samples, tokens])}\n")
                    process.stdin.flush()
                    found[kind].append(json.loads(answer(process)))
        finally:
            for process in processes.values():
                process.kill()
                process.wait()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        asyncio.run(serve(asked.serve, str(base_folder()), asked.work))
        return
    found = measured(asked.samples, asked.tokens, asked.rounds)
    total = asked.samples * asked.tokens
    print("| engine | tokens/s | first round, s |\n|---|---|---|")
    for kind, times in found.items():
        print(f"| {kind} | {total / statistics.median(times[1:]):.0f} | {times[0]:.1f} |")
    pairs = zip(found["vllm"][1:], found["jax"][1:], strict=True)
    ratio = statistics.median(vllm / jax for vllm, jax in pairs)
    print(f"JAX / vLLM: {ratio:.2f}")
    emit("jax_engine", {"seconds": found, "tokens": total, "ratio": ratio})


if __name__ == "__main__":
    main()
