"""Phases, transfer and logprob agreement on a GPU.

It measures trainer offload, bucket packing, memory that two processes share, and vLLM's sleep, wake
and weight load next to a trainer.

    bench/gpu/run.sh [--tiny]

The weights are random, in the shapes of Qwen3 0.5B, 4B and 8B. With only torch installed, it
measures offload, packing and shared memory. It prints which parts it skips because of missing
packages.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor

from skyrl_actors.messages.weights import TensorEntry, WeightManifest, WeightStream
from skyrl_actors.transport.device_memory import placed
from skyrl_actors.transport.streams import from_live, open_stream, received

if TYPE_CHECKING:  # the rest must run with torch alone
    from skyrl_actors.engines.vllm_engine import VllmEngine
    from skyrl_actors.workers.torch_worker import TorchWorker

ROUNDS = 3
# not part of a switch: the version is written, and loaded from the file
ASIDE = (
    "write_s",
    "mapped_file_s",
)
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "head_dim": 128,
        "vocab_size": 151_936,
    },
    "4B": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "head_dim": 128,
        "vocab_size": 151_936,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "head_dim": 128,
        "vocab_size": 151_936,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
    },
}


class Bench:
    def __init__(self, tiny: bool):
        self.on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.on_gpu else "cpu")
        self.bytes = 2**22 if tiny else 4 * 2**30

    def seconds(self, work: Callable[[], Any]) -> float:
        """Return the median seconds after a warm-up."""
        found: list[float] = []
        for _ in range(ROUNDS + 1):
            self.finish()
            started = time.perf_counter()
            work()
            self.finish()
            found.append(time.perf_counter() - started)
        return statistics.median(found[1:])

    def finish(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def offload(self) -> dict[str, float]:
        """Measure GB/s of the trainer's offload from device to pinned memory and back."""
        here = torch.ones(self.bytes // 4, device=self.device)
        there = placed(here, torch.device("cpu"))
        down = self.seconds(lambda: placed(here, torch.device("cpu")))
        up = self.seconds(lambda: placed(there, self.device))
        pinned = torch.empty(here.shape, pin_memory=self.on_gpu)  # the bandwidth of the link
        link_down, link_up = (
            self.seconds(lambda: pinned.copy_(here)),
            self.seconds(lambda: here.copy_(pinned)),
        )
        return {
            "offload_gb_per_s": self._rate(down),
            "onload_gb_per_s": self._rate(up),
            "link_down_gb_per_s": self._rate(link_down),
            "link_up_gb_per_s": self._rate(link_up),
            "offload_ratio": round(link_down / down, 3),
            "onload_ratio": round(link_up / up, 3),
        }

    def packing(self) -> dict[str, float]:
        """Measure GB/s of packing a layer's tensors into one bucket."""
        parts = [
            torch.ones(self.bytes // 64, device=self.device, dtype=torch.uint8) for _ in range(64)
        ]
        bucket = torch.empty(
            sum(part.numel() for part in parts), device=self.device, dtype=torch.uint8
        )
        return {"packing_gb_per_s": self._rate(self.seconds(lambda: torch.cat(parts, out=bucket)))}

    def sharing(self) -> dict[str, float]:
        """Measure GB/s of a second process that copies a tensor by handle (CUDA IPC)."""
        context = multiprocessing.get_context("spawn")
        to_child, from_child = context.Queue(), context.Queue()
        child = context.Process(target=_copy_what_comes, args=(to_child, from_child), daemon=True)
        child.start()
        shared = torch.ones(self.bytes, device=self.device, dtype=torch.uint8)

        def once() -> None:
            to_child.put(shared)
            assert from_child.get(timeout=120) == shared.numel()

        took = self.seconds(once)
        to_child.put(None)
        child.join(30)
        return {"ipc_gb_per_s": self._rate(took)}

    def lending(self) -> dict[str, float]:
        """Measure the ipc transfer of 64 tensors to a second process.

        The start of both ends is included.
        """
        context = multiprocessing.get_context("spawn")
        to_child, from_child = context.Queue(), context.Queue()
        child = context.Process(
            target=_receive_what_is_lent, args=(to_child, from_child, str(self.device)), daemon=True
        )
        child.start()
        live = torch.ones(self.bytes // 4, device=self.device)
        size = self.bytes // 64
        entries = tuple(
            TensorEntry(str(i), (size // 4,), "float32", i * size, size) for i in range(64)
        )
        manifest = WeightManifest(
            version="m@1", kind="full", path="not written", num_bytes=self.bytes, tensors=entries
        )

        def once() -> None:
            asked = WeightStream("127.0.0.1", 0, 2, "ipc", max(self.bytes // 16, size), 120.0)
            to_child.put(
                (open_stream(manifest, asked, self.device, from_live(entries, live))[0], entries)
            )
            assert from_child.get(timeout=120) == self.bytes

        took = self.seconds(once)
        to_child.put(None)
        child.join(30)
        return {"ipc_transfer_gb_per_s": self._rate(took)}

    def _rate(self, took: float) -> float:
        return round(self.bytes / took / 1e9, 2)


def _copy_what_comes(arriving: Any, answers: Any) -> None:
    while (tensor := arriving.get()) is not None:
        own: Tensor = tensor.clone()
        if own.is_cuda:
            torch.cuda.synchronize()
        answers.put(own.numel())


def _receive_what_is_lent(arriving: Any, answers: Any, device: str) -> None:
    while (asked := arriving.get()) is not None:
        stream, entries = asked
        answers.put(
            sum(
                tensor.nbytes
                for _, tensor in received(stream, list(entries), 1, torch.device(device))
            )
        )


def missing(*names: str) -> list[str]:
    found: list[str] = []
    for name in names:
        try:
            import_module(name)
        except ImportError:
            found.append(name)
    return found


def make_base(name: str, folder: Path, dtype: torch.dtype) -> None:
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from bench.harness import base_folder

    torch.manual_seed(0)
    config = Qwen3Config(
        **SHAPES[name],
        num_key_value_heads=2 if name == "tiny" else 8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).to(dtype).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base_folder()).save_pretrained(folder)


async def engine(name: str, bench: Bench, work: Path) -> dict[str, Any]:
    """Measure sleep, wake, load and agreement of one shape on one device."""
    import numpy as np

    from skyrl_actors.engines.interface import EngineSpec
    from skyrl_actors.engines.vllm_engine import VllmEngine
    from skyrl_actors.messages.columns import columns_from
    from skyrl_actors.messages.example import TARGETS, Example
    from skyrl_actors.messages.model import LossCall, ModelSpec
    from skyrl_actors.messages.requests import SamplingParams
    from skyrl_actors.workers.interface import PartCall, RowOutput, WorkerSpec
    from skyrl_actors.workers.torch_worker import TorchWorker

    dtype, kind = ("bfloat16", "gpu") if bench.on_gpu else ("float32", "cpu")
    base = work / name
    make_base(name, base, getattr(torch, dtype))
    kv_bytes = 8 * 2**30 if bench.on_gpu else 64 * 2**20
    served = VllmEngine(
        EngineSpec(
            name="e",
            base_folder=str(base),
            device=kind,
            dtype=dtype,
            max_model_len=512,
            max_num_seqs=16,
            max_num_batched_tokens=2048,
            kv_cache_bytes=kv_bytes,
            max_loras=2,
            max_lora_rank=16,
            max_adapters=8,
            enforce_eager=True,
            call_timeout_s=600.0,
        )
    )  # type: ignore[arg-type]
    await served.start()
    worker = TorchWorker(
        WorkerSpec(
            role="policy",
            rank=0,
            world_size=1,
            base_folder=str(base),
            dtype=dtype,
            device=kind,
            num_threads=2,
            microbatch_tokens=2048,
            collective_timeout_s=600.0,
            preload=False,
        )
    )  # type: ignore[arg-type]
    worker.setup("127.0.0.1", 0)
    worker.create_model(ModelSpec(model_id="full", base_model="b"))
    tokens = np.random.default_rng(0).integers(0, 512, 64).astype(np.int32)
    row = columns_from([Example(tokens[:-1], {TARGETS: tokens[1:]})])
    found: dict[str, list[float]] = {}

    def note(what: str, started: float) -> None:
        found.setdefault(what, []).append(time.perf_counter() - started)

    difference = 0.0
    for number in range(ROUNDS):
        started = time.perf_counter()
        await served.sleep(2)
        note("sleep_s", started)
        started = time.perf_counter()
        worker.move(("weights", "gradients"), "device")
        note("onload_s", started)
        (output,) = worker.forward_backward(
            (
                PartCall(
                    model_id="full", rows=(0,), columns=row, loss=LossCall("cross_entropy", {})
                ),
            ),
            True,
        )
        assert isinstance(output, RowOutput)
        started = time.perf_counter()
        manifest = worker.export_weights(
            "full", str(work / f"{name}@{number}"), f"{name}@{number}", False, "lazy"
        )
        assert manifest is not None
        worker.move(("gradients",), "host")
        note("save_s", started)
        started = time.perf_counter()
        await served.wake("weights")
        note("wake_weights_s", started)
        started = time.perf_counter()
        lent = worker.open_stream(manifest, WeightStream("", 0, 2, "ipc", 2**28, 120.0))
        await served.load_full(manifest.version, (manifest,), (lent,))
        note("ipc_s", started)
        started = time.perf_counter()
        worker.write_versions("full", ())
        note("write_s", started)
        started = time.perf_counter()
        await served.load_full(manifest.version, (manifest,))
        note("mapped_file_s", started)
        started = time.perf_counter()
        worker.move(("weights",), "host")
        await served.wake("kv_cache")
        note("offload_and_wake_kv_s", started)
        worker.discard_export(manifest.path)
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=True)
        sampled = await served.sample(
            f"r{number}", tuple(tokens.tolist()), params, None, manifest.version
        )
        assert sampled.prompt_logprobs is not None
        difference = float(np.abs(sampled.prompt_logprobs[1:] - output.values).mean())
    adapter = await lora_switches(served, worker, work, tokens.tolist())
    await served.stop()
    medians = {what: round(statistics.median(values), 4) for what, values in found.items()}
    return {
        **medians,
        "switch_s": round(sum(took for what, took in medians.items() if what not in ASIDE), 4),
        "mean_logprob_difference": float(f"{difference:.3g}"),
        **adapter,
    }


async def lora_switches(
    served: "VllmEngine", worker: "TorchWorker", work: Path, prompt: list[int]
) -> dict[str, float]:
    """Measure the time from an adapter's step to its first token.

    The engine sleeps at level 1, which keeps the base. The adapter is written, added and used.
    `lora_switch_s` is all but the first token, and includes `lora_wake_s`, the engine's wake.
    """
    from skyrl_actors.engines.interface import BASE_VERSION
    from skyrl_actors.messages.model import LoraSpec, ModelSpec
    from skyrl_actors.messages.requests import SamplingParams
    from skyrl_actors.transfer.folders import full_manifests

    worker.create_model(
        ModelSpec(model_id="lora", base_model="b", lora=LoraSpec(rank=16, train_unembed=False))
    )
    await served.load_full(
        BASE_VERSION, full_manifests(Path(worker.spec.base_folder), BASE_VERSION)
    )
    found: dict[str, list[float]] = {
        "lora_switch_s": [],
        "lora_wake_s": [],
        "lora_first_token_s": [],
    }
    for number in range(ROUNDS):
        await served.sleep(1)
        started = time.perf_counter()
        manifest = worker.export_weights(
            "lora", str(work / f"lora@{number}"), f"lora@{number}", False
        )
        assert manifest is not None
        waking = time.perf_counter()
        await served.wake("weights")
        await served.wake("kv_cache")
        found["lora_wake_s"].append(time.perf_counter() - waking)
        await served._prepare(manifest, served._loaded or "")
        served._adapters.release(manifest)
        done = time.perf_counter()
        found["lora_switch_s"].append(done - started)
        await served.sample(
            f"lora{number}",
            tuple(prompt),
            SamplingParams(max_tokens=1, temperature=0.0),
            manifest,
            manifest.version,
        )
        found["lora_first_token_s"].append(time.perf_counter() - done)
    return {what: round(statistics.median(values), 4) for what, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tiny", action="store_true", help="small shapes, to try the script on any machine"
    )
    options = parser.parse_args()
    bench = Bench(options.tiny)
    if not options.tiny and not bench.on_gpu:
        raise SystemExit(
            "this machine has no CUDA device; --tiny runs the script with small shapes"
        )
    result: dict[str, Any] = bench.offload() | bench.packing() | bench.sharing() | bench.lending()
    if absent := missing("vllm", "transformers", "pydantic", "safetensors"):
        print(
            "skipped: sleep, wake, load and agreement, "
            f"because {', '.join(absent)} cannot be imported"
        )
    else:
        from skyrl_actors.backends.actor_env import actor_environment
        from skyrl_actors.config.cluster import ClusterConfig, PlacementConfig

        device: Any = "gpu" if bench.on_gpu else "cpu"
        os.environ |= actor_environment(ClusterConfig(placement=PlacementConfig(device=device)))
        os.environ["OMP_NUM_THREADS"] = "1"
        work = Path(tempfile.mkdtemp(prefix="bench-engines-", dir="/dev/shm"))
        try:
            for name in ("tiny",) if options.tiny else ("0.5B", "4B", "8B"):
                result[name] = asyncio.run(engine(name, bench, work))
        finally:
            shutil.rmtree(work)
    if options.tiny:
        print(json.dumps({"bench": "gpu_engines", **result}))  # the figures mean nothing
        return
    result["device"] = torch.cuda.get_device_name()
    if missing("psutil"):
        print(json.dumps({"bench": "gpu_engines", **result}))
        return
    from bench.harness import emit

    emit("gpu_engines", result)


if __name__ == "__main__":
    main()
