"""Seconds in which one base model takes the devices of another, beside a copy of the same bytes.

Two clients alternate between two base models, of which one is on the device at a time. A call that
finds its base model parked is compared with the next call of the same kind, which finds it there.
`switch_s` is the difference of their medians. `copy_s` is the time of one copy of the memory that a
switch frees and takes, which is the KV cache. `load_s` is the start of a third one from disk: new
processes, which import torch and vLLM.

python -m bench.catalogue [--rounds 30]
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tinker
from rich.progress import track
from tinker import types

from bench.harness import NAME, ROOT, emit, service

BASES = ("skyrl-actors/tiny", "skyrl-actors/tiny-moe", "skyrl-actors/tiny-vl")
KV_BYTES = 128 * 2**20
TOKENS = list(range(1, 33))
DATUM = types.Datum(
    model_input=types.ModelInput.from_ints(TOKENS[:-1]),
    loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * 31},
)


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def copying() -> float:
    """Return the seconds of one copy of the bytes of a KV cache."""
    source = np.ones(KV_BYTES, np.uint8)
    target = np.zeros(KV_BYTES, np.uint8)
    return seconds(lambda: np.copyto(target, source))


def moves() -> dict[str, dict[str, float]]:
    """Return the seconds of the last moves of each base model."""
    command = [sys.executable, "-m", "skyrl_actors", "status", "--name", NAME, "--json"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    bases = json.loads(shown.stdout)["base_models"]
    return {name: bases[name]["move_seconds"] for name in bases}


def measured(rounds: int) -> dict[str, Any]:
    """Alternate between two base models. Return medians of both kinds of calls."""
    client = tinker.ServiceClient()
    models = [client.create_lora_training_client(base, rank=8, seed=1) for base in BASES[:2]]
    ready = [model.result() if hasattr(model, "result") else model for model in models]
    samplers = [client.create_sampling_client(base_model=base) for base in BASES[:2]]
    params = types.SamplingParams(max_tokens=1, seed=1)
    prompt = types.ModelInput.from_ints(TOKENS)
    calls: dict[str, list[Callable[[], Any]]] = {
        "pass": [
            lambda m=model: m.forward_backward([DATUM], "cross_entropy").result() for model in ready
        ],
        "sample": [lambda s=one: s.sample(prompt, 1, params).result() for one in samplers],
    }
    found: dict[str, list[float]] = {}
    for name, pair in calls.items():
        for call in pair:
            call()  # the first call of each is no switch to measure
        for _ in track(range(rounds), name, transient=True):
            for call in pair:
                found.setdefault(f"{name}_parked_s", []).append(seconds(call))
                found.setdefault(f"{name}_there_s", []).append(seconds(call))
                found.setdefault("copy_s", []).append(copying())
    medians = {name: round(statistics.median(values), 4) for name, values in found.items()}
    for name in calls:
        switch = medians[f"{name}_parked_s"] - medians[f"{name}_there_s"]
        medians[f"{name}_switch_s"] = round(switch, 4)
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    options = ("parking.min_residence_s=0", "parking.idle_s=0", "parking.max_loaded=2")
    with service(*options, config="configs/cpu_catalogue.yaml") as _:
        found = measured(rounds)
        third = tinker.ServiceClient().create_sampling_client(base_model=BASES[2])
        params = types.SamplingParams(max_tokens=1)
        load_s = seconds(lambda: third.sample(types.ModelInput.from_ints([1]), 1, params).result())
        emit("catalogue", {"rounds": rounds, **found, "load_s": round(load_s, 2), "moves": moves()})


if __name__ == "__main__":
    main()
