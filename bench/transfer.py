"""Seconds to move all weights of a 100M-parameter float32 model, and an adapter, from a training rank into a vLLM engine.

    python -m bench.transfer

One JSON line, medians. shm_s: freezing the version in shared memory, and the engine's load of it. repack_s: the engine loading again what
it has mapped already, which is vLLM's own work on its layers. shm_ratio: shm_s against repack_s and a
plain copy of the same bytes into new memory (copy_s; warm_copy_s into memory that was used before). Deleting versions is not counted: it
happens when they are no longer wanted. gloo_s: freezing, and a broadcast by TCP in buckets; live_s: the
same from the weights themselves, with nothing written. lora_ms: an adapter of rank 16 written and added.
Checksums are off here; with them: shm_checked_s.
"""

import asyncio
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from skyrl_actors.backends.environment import actor_environment
from skyrl_actors.config.cluster import ClusterConfig

ROUNDS = 5
SHAPE = {
    "vocab_size": 32_768, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 11, "num_attention_heads": 12,
    "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 512, "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip


def make_base(folder: Path) -> None:
    """Random weights; the tokenizer of the tiny model, as nothing is decoded."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from bench.harness import base_folder

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base_folder()).save_pretrained(folder)


async def seconds(work: Callable[[int], Awaitable[None]], behind: Callable[[int], None] = lambda number: None) -> float:
    """Median, behind one that warms up; what is done `behind` each is not counted."""
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

    worker = TorchWorker(WorkerSpec("policy", 0, 1, str(base), "float32", "cpu", 1, 512, 60.0))
    worker.setup("127.0.0.1", 0)
    worker.create_model(ModelSpec("full", "b"))
    worker.create_model(ModelSpec("lora", "b", lora=LoraSpec(16, train_unembed=False)))
    engine = VllmEngine(EngineSpec("e", str(base), "cpu", "float32", 256, 8, 512, 64 * 2**20, 2, 16, 8, True, 120.0))
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
        asked = WeightStream("", 0, 2, "gloo", 64 * 2**20, 60.0)
        await engine.load_full(manifest.version, (manifest,), (worker.open_stream(manifest, asked),))

    async def live(number: int) -> None:
        manifest = worker.export_weights("full", str(work / f"full@{number}"), f"full@{number}", False, "when_needed")
        assert manifest is not None
        asked = WeightStream("", 0, 2, "gloo", 64 * 2**20, 60.0)
        await engine.load_full(manifest.version, (manifest,), (worker.open_stream(manifest, asked),))

    async def repack(number: int) -> None:
        await engine.load_full("kept", (kept,))

    async def lora(number: int) -> None:
        manifest = worker.export_weights("lora", str(work / f"lora@{number}"), f"lora@{number}", False)
        assert manifest is not None
        await engine._lora_request(manifest)

    source, target = np.ones(kept.num_bytes, np.uint8), np.zeros(kept.num_bytes, np.uint8)

    async def warm_copy(number: int) -> None:
        np.copyto(target, source)

    async def copy(number: int) -> None:
        np.copyto(np.empty_like(source), source)

    shm_s, repack_s = await seconds(shm, discard), await seconds(repack)
    copy_s, warm_copy_s = await seconds(copy), await seconds(warm_copy)
    checked_s, gloo_s, lora_s = await seconds(lambda n: shm(n, True), discard), await seconds(gloo, discard), await seconds(lora)
    live_s = await seconds(live, discard)
    await engine.stop()
    return {
        "bytes": kept.num_bytes, "shm_ratio": round(shm_s / (repack_s + copy_s), 2), "shm_s": round(shm_s, 3), "repack_s": round(repack_s, 3),
        "copy_s": round(copy_s, 3), "warm_copy_s": round(warm_copy_s, 3), "shm_checked_s": round(checked_s, 3), "gloo_s": round(gloo_s, 3),
        "live_s": round(live_s, 3), "lora_ms": round(lora_s * 1000, 1), "rounds": ROUNDS,
    }  # fmt: skip


def main() -> None:
    os.environ |= actor_environment(ClusterConfig()) | {"OMP_NUM_THREADS": "1"}  # before torch is imported
    from bench.harness import emit

    work = Path(tempfile.mkdtemp(prefix="bench-transfer-", dir="/dev/shm"))
    try:
        make_base(work / "base")
        emit("transfer", asyncio.run(measure(work / "base", work)))
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
