"""Seconds to move all weights of a full fine-tune from trainer to engine, against a plain memory copy of the same bytes.

publish = SDK call to answer, while the trainer writes its weights into shared memory; load = the engine wakes, maps, repacks and swaps them.
"""

import json
import statistics
import subprocess
import sys
import time

import numpy as np
import tinker
from tinker import types

from bench.harness import NAME, ROOT, emit, service

ROUNDS = 7


def load_seconds() -> list[float]:
    done = subprocess.run(
        [sys.executable, "-m", "skyrl_actors", "status", "--name", NAME, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)["weight_load_seconds"]


def main() -> None:
    publish, copies = [], []
    with service("base_model.warmup_steps=0"), tinker.ServiceClient() as client:
        model = client.create_lora_training_client("skyrl-actors/tiny", rank=0).result()
        prompt = types.ModelInput.from_ints([1, 2, 3])
        for _ in range(ROUNDS):
            started = time.perf_counter()
            sampler = model.save_weights_and_get_sampling_client().result()
            publish.append(time.perf_counter() - started)
            sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result()
            num_bytes = 4 * 2_128_064
            source = np.ones(num_bytes, np.uint8)
            target = np.empty_like(source)
            target[:] = 0
            started = time.perf_counter()
            np.copyto(target, source)
            copies.append(time.perf_counter() - started)
        loads = load_seconds()
    emit("transfer", {
        "bytes": num_bytes, "publish_s": round(statistics.median(publish), 5), "engine_load_s": round(statistics.median(loads), 5),
        "memory_copy_s": round(statistics.median(copies), 6),
        "transfer_over_copy": round((statistics.median(publish) + statistics.median(loads)) / statistics.median(copies), 1),
        "rounds": ROUNDS,
    })  # fmt: skip


if __name__ == "__main__":
    main()
