"""Seconds to transfer weights from a training rank to a vLLM engine.

    python -m bench.transfer

The weights are those of a float32 model with 100M parameters, and an adapter. The result is one
JSON line with medians:

- shm_s: write the version to shared memory, and load it in the engine.
- repack_s: load mapped weights again, which is vLLM's own work on its layers.
- copy_s: copy the same bytes to new memory; warm_copy_s: copy them to used memory.
- shm_ratio: shm_s divided by the sum of repack_s and copy_s.
- gloo_s: write the version, and broadcast it over TCP in buckets.
- live_s: broadcast the live weights, and write nothing.
- lora_ms: write and add an adapter of rank 16.
- shm_checked_s: shm_s with checksums, which are off in the others.

The deletion of versions is not counted, because it happens later.
"""

import asyncio
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from skyrl_actors.backends.actor_env import actor_environment
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.transfers import BUCKET_BYTES

ROUNDS = 5
SHAPE = {
    "vocab_size": 32_768,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 11,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "bos_token_id": None,
}


def make_base(folder: Path) -> None:
    """Create a model with random weights. Its tokenizer is unused, so it is the tiny model's."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from bench.harness import base_folder

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base_folder()).save_pretrained(folder)


async def seconds(
    work: Callable[[int], Awaitable[None]], behind: Callable[[int], None] = lambda number: None
) -> float:
    """Return the median seconds after a warm-up. The call of `behind` after each is not counted."""
    found: list[float] = []
    for number in range(ROUNDS + 1):
        started = time.perf_counter()
        await work(number)
        found.append(time.perf_counter() - started)
        behind(number)
    return statistics.median(found[1:])


async def measure(base: Path, work: Path) -> dict[str, float]:
    import numpy as np

    from skyrl_actors.engines.interface import EngineSpec
    from skyrl_actors.engines.vllm_engine import VllmEngine
    from skyrl_actors.messages.model import LoraSpec, ModelSpec
    from skyrl_actors.messages.weights import WeightStream
    from skyrl_actors.workers.interface import WorkerSpec
    from skyrl_actors.workers.torch_worker import TorchWorker

    worker = TorchWorker(
        WorkerSpec(
            role="policy",
            rank=0,
            world_size=1,
            base_folder=str(base),
            dtype="float32",
            device="cpu",
            num_threads=1,
            microbatch_tokens=512,
            collective_timeout_s=60.0,
        )
    )
    worker.setup("127.0.0.1", 0)
    worker.create_model(ModelSpec(model_id="full", base_model="b"))
    worker.create_model(
        ModelSpec(model_id="lora", base_model="b", lora=LoraSpec(rank=16, train_unembed=False))
    )
    engine = VllmEngine(
        EngineSpec(
            name="e",
            base_folder=str(base),
            device="cpu",
            dtype="float32",
            max_model_len=256,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            kv_cache_bytes=64 * 2**20,
            max_loras=2,
            max_lora_rank=16,
            max_adapters=8,
            enforce_eager=True,
            call_timeout_s=120.0,
        )
    )
    await engine.start()

    def frozen(version: str, checksums: bool = False):
        manifest = worker.export_weights("full", str(work / version), version, checksums)
        assert manifest is not None
        return manifest

    kept = frozen("kept")

    async def shm(number: int, checksums: bool = False) -> None:
        manifest = frozen(f"full@{number}", checksums)
        await engine.load_full(manifest.version, (manifest,))

    def discard(number: int) -> None:
        worker.discard_export(str(work / f"full@{number}"))

    async def gloo(number: int) -> None:
        manifest = frozen(f"full@{number}")
        asked = WeightStream("", 0, 2, "gloo", BUCKET_BYTES["gloo"], 60.0)
        await engine.load_full(
            manifest.version, (manifest,), (worker.open_stream(manifest, asked),)
        )

    async def live(number: int) -> None:
        manifest = worker.export_weights(
            "full", str(work / f"full@{number}"), f"full@{number}", False, "lazy"
        )
        assert manifest is not None
        asked = WeightStream("", 0, 2, "gloo", BUCKET_BYTES["gloo"], 60.0)
        await engine.load_full(
            manifest.version, (manifest,), (worker.open_stream(manifest, asked),)
        )

    async def repack(number: int) -> None:
        await engine.load_full("kept", (kept,))

    async def lora(number: int) -> None:
        manifest = worker.export_weights(
            "lora", str(work / f"lora@{number}"), f"lora@{number}", False
        )
        assert manifest is not None
        await engine._prepare(manifest, engine._loaded or "")
        engine._adapters.release(manifest)

    source, target = np.ones(kept.num_bytes, np.uint8), np.zeros(kept.num_bytes, np.uint8)

    async def warm_copy(number: int) -> None:
        np.copyto(target, source)

    async def copy(number: int) -> None:
        np.copyto(np.empty_like(source), source)

    shm_s, repack_s = await seconds(shm, discard), await seconds(repack)
    copy_s, warm_copy_s = await seconds(copy), await seconds(warm_copy)
    checked_s, gloo_s, lora_s = (
        await seconds(lambda n: shm(n, True), discard),
        await seconds(gloo, discard),
        await seconds(lora),
    )
    live_s = await seconds(live, discard)
    await engine.stop()
    return {
        "bytes": kept.num_bytes,
        "shm_ratio": round(shm_s / (repack_s + copy_s), 2),
        "shm_s": round(shm_s, 3),
        "repack_s": round(repack_s, 3),
        "copy_s": round(copy_s, 3),
        "warm_copy_s": round(warm_copy_s, 3),
        "shm_checked_s": round(checked_s, 3),
        "gloo_s": round(gloo_s, 3),
        "live_s": round(live_s, 3),
        "lora_ms": round(lora_s * 1000, 1),
        "rounds": ROUNDS,
    }


def main() -> None:
    # must precede the import of torch
    os.environ |= actor_environment(ClusterConfig()) | {"OMP_NUM_THREADS": "1"}
    from bench.harness import emit

    work = Path(tempfile.mkdtemp(prefix="bench-transfer-", dir="/dev/shm"))
    try:
        make_base(work / "base")
        emit("transfer", asyncio.run(measure(work / "base", work)))
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
