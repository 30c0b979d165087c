"""The cost of a phase change: seconds and bytes of every move while a client trains and samples.

    python -m bench.phases

The result is one JSON line with the median milliseconds and MiB of each move, for LoRA and full
fine-tune of the tiny model. They come from the service's phase timeline.
"""

import json
import statistics
import subprocess
import sys
from typing import Any

import tinker
from tinker import types

from bench.harness import NAME, ROOT, emit, service

ROUNDS = 12


def timeline() -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "skyrl_actors", "status", "--name", NAME, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["phase_timeline"]


def alternate(client: tinker.ServiceClient, rank: int) -> dict[str, Any]:
    model = client.create_lora_training_client("skyrl-actors/tiny", rank=rank).result()
    prompt = types.ModelInput.from_ints(list(range(32)))
    targets = {"target_tokens": list(range(1, 33))}
    row = types.Datum(model_input=prompt, loss_fn_inputs=targets)  # type: ignore[arg-type]
    for _ in range(ROUNDS):
        model.forward_backward([row], "cross_entropy").result()
        model.optim_step(types.AdamParams(learning_rate=1e-4)).result()
        sampler = model.save_weights_and_get_sampling_client().result()
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=4)).result()
    moves: dict[str, list[tuple[float, int]]] = {}
    entered = timeline()
    for change in entered:
        for name, seconds, size in change["moves"]:
            moves.setdefault(name, []).append((seconds, size))
    return {
        "change_ms": round(1000 * statistics.median(change["seconds"] for change in entered), 2),
        **{
            name: {
                "ms": round(1000 * statistics.median(s for s, _ in found), 2),
                "mib": round(statistics.median(b for _, b in found) / 2**20, 1),
            }
            for name, found in moves.items()
        },
    }


def main() -> None:
    found: dict[str, Any] = {}
    for kind, rank in (("lora", 8), ("full", 0)):
        with service("base_model.warmup_steps=0", "critic=null"), tinker.ServiceClient() as client:
            found[kind] = alternate(client, rank)
    emit("phases", found)


if __name__ == "__main__":
    main()
