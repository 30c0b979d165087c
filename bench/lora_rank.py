"""What `lora.max_rank` costs on a CPU: sampled tokens per second with an adapter of rank 8.

Services with each value alternate. Each is asked for 64 sequences of up to 128 tokens, several
times.
"""

import statistics
import time
from collections import defaultdict

import tinker
from tinker import types

from bench.harness import emit, service

RANKS, SERVICES, ROUNDS = (32, 128), 2, 9
PROMPT = types.ModelInput.from_ints([70, 71, 72, 73])


def rates(max_rank: int) -> list[float]:
    """Return tokens per second of each round of a new service, without the first two."""
    found: list[float] = []
    options = (f"lora.max_rank={max_rank}", "critic=null", "base_model.warmup_steps=0")
    with service(*options), tinker.ServiceClient() as client:
        model = client.create_lora_training_client(base_model="skyrl-actors/tiny", rank=8)
        sampler = model.save_weights_and_get_sampling_client()
        for seed in range(ROUNDS):
            asked = types.SamplingParams(max_tokens=128, seed=seed)
            start = time.perf_counter()
            answer = sampler.sample(PROMPT, num_samples=64, sampling_params=asked).result()
            tokens = sum(len(sequence.tokens) for sequence in answer.sequences)
            found.append(tokens / (time.perf_counter() - start))
    return found[2:]


def main() -> None:
    found: dict[int, list[float]] = defaultdict(list)
    for _ in range(SERVICES):
        for rank in RANKS:
            found[rank] += rates(rank)
    low, high = (statistics.median(found[rank]) for rank in RANKS)
    emit("lora_rank", {"tokens_s_32": low, "tokens_s_128": high, "ratio": high / low})


if __name__ == "__main__":
    main()
