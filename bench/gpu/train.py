"""Training on a GPU: LoRA speed, tenants in one pass, and memory of a full fine-tune.

    bench/gpu/run.sh [--tiny]

LoRA speed is tokens per second and model FLOP utilisation. The weights are random, in the shapes of
Qwen3-4B and Qwen3-8B, because speed and memory do not depend on their values.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import Qwen3Config

from bench.harness import emit
from bench.train_setup import CALL, columns_of, folder_of, rows_of
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.model import AdamParams, LoraSpec, ModelSpec
from skyrl_actors.workers import head
from skyrl_actors.workers.head import HeadSegment, score
from skyrl_actors.workers.interface import PartCall, RowOutput, WorkerSpec
from skyrl_actors.workers.torch_worker import TorchWorker

ROUNDS = 5
SHAPES: dict[str, dict[str, int]] = {
    "4B": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}
# dense bfloat16, from the vendor's data sheets
PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
}


def shape_of(name: str) -> Qwen3Config:
    return Qwen3Config(
        **SHAPES[name],
        vocab_size=512 if name == "tiny" else 151_936,
        head_dim=128 if name != "tiny" else 64,
        max_position_embeddings=40_960,
        tie_word_embeddings=name == "4B",
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=None,
    )


class Bench:
    def __init__(self, tiny: bool):
        self.tiny = tiny
        self.device = "gpu" if torch.cuda.is_available() else "cpu"
        self.dtype = "bfloat16" if self.device == "gpu" else "float32"

    def worker(self, folder: Any, budget: int, **options: Any) -> TorchWorker:
        dtype = options.pop("dtype", self.dtype)
        worker = TorchWorker(
            WorkerSpec(
                role="policy",
                rank=0,
                world_size=1,
                base_folder=str(folder),
                dtype=dtype,
                device=self.device,
                num_threads=2,
                microbatch_tokens=budget,
                collective_timeout_s=600.0,
                **options,
            )
        )  # type: ignore[arg-type]
        worker.setup("127.0.0.1", 29_555)
        return worker

    def seconds(self, work: Callable[[], Any]) -> float:
        """Return the median seconds after a warm-up.

        The device is synchronized before each reading.
        """
        found = []
        for _ in range(ROUNDS + 1):
            self.finish()
            started = time.perf_counter()
            work()
            self.finish()
            found.append(time.perf_counter() - started)
        return statistics.median(found[1:])

    def finish(self) -> None:
        if self.device == "gpu":
            torch.cuda.synchronize()

    def peak_flops(self) -> float | None:
        name = torch.cuda.get_device_name() if self.device == "gpu" else ""
        return next((flops for key, flops in PEAK_FLOPS.items() if key in name), None)

    def lora(self) -> dict[str, Any]:
        """Measure 16k packed tokens of one adapter, then 8 tenants in one pass and one at a time.

        A tenant has 2 rows of 64 tokens.
        """
        with folder_of(
            shape_of("tiny" if self.tiny else "4B"),
            torch.bfloat16 if self.device == "gpu" else torch.float32,
        ) as folder:
            worker = self.worker(folder, 16_384, activations="recompute")
            names = [f"t{i}" for i in range(8)]
            for i, name in enumerate(names):
                worker.create_model(
                    ModelSpec(
                        model_id=name,
                        base_model="b",
                        lora=LoraSpec(rank=32, train_unembed=False),
                        seed=i,
                    )
                )
            vocab = worker.model_factory.base.vocab_size
            columns = columns_of(rows_of(0, [512] * (2 if self.tiny else 32), vocab))
            whole = self.seconds(lambda: compute(worker, [(names[0], columns)]))
            small = [
                (name, columns_of(rows_of(i, [64, 64], vocab))) for i, name in enumerate(names)
            ]
            together = self.seconds(lambda: compute(worker, small))
            alone = self.seconds(lambda: [compute(worker, [part]) for part in small])
            weights = sum(
                parameter.numel() for parameter in worker.model_factory.base.module.parameters()
            )
        rate, peak = columns.num_tokens / whole, self.peak_flops()
        return {
            "lora_tokens_per_s": round(rate),
            "tenants8_ratio": round(alone / together, 3),
            "base_weights": weights,
            # Forward and backward through frozen weights take 2 + 2 operations for each weight.
            # Recomputation is not counted.
            "lora_mfu": round(4 * weights * rate / peak, 4) if peak else None,
        }

    def full(self) -> dict[str, Any]:
        """Measure the memory of a full fine-tune in each phase, in GiB."""
        if self.device == "cpu" and not self.tiny:
            return {}
        found: dict[str, float] = {}
        with folder_of(
            shape_of("tiny" if self.tiny else "8B"),
            torch.bfloat16 if self.device == "gpu" else torch.float32,
        ) as folder:
            worker = self.worker(folder, 4096, activations="recompute", preload=False)
            worker.create_model(ModelSpec(model_id="full", base_model="b"))
            found["created"] = self.gib()
            vocab = worker.models["full"].network.vocab_size
            compute(worker, [("full", columns_of(rows_of(0, [512] * 8, vocab)))])
            found["forward_backward"] = self.gib(peak=True)
            worker.optim_step("full", AdamParams(learning_rate=1e-5))
            found["stepped"] = self.gib()
            worker.move(("gradients", "optimizer", "weights"), "host")
            found["offloaded"] = self.gib()
        return {"full_gib": found}

    def gib(self, peak: bool = False) -> float:
        if self.device == "cpu":
            return 0.0
        used = torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
        return round(used / 2**30, 2)

    def heads(self) -> dict[str, Any]:
        """Compare the head with full logits, and its compiled passes with plain ones.

        Each runs forward and backward over 4096 tokens.
        """
        device = "cuda" if self.device == "gpu" else "cpu"
        tokens, vocab, width = (64, 512, 128) if self.tiny else (4096, 151_936, 2560)
        dtype = torch.bfloat16 if self.device == "gpu" else torch.float32
        hidden = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
        weight = torch.randn(vocab, width, device=device, dtype=dtype) * 0.02
        targets = torch.randint(0, vocab, (tokens,), device=device)
        ours = self.seconds(
            lambda: (
                score(hidden, weight, targets, [HeadSegment(num_tokens=tokens)])[0].sum().backward()
            )
        )
        full = self.seconds(
            lambda: F.cross_entropy(
                F.linear(hidden, weight).float(), targets, reduction="sum"
            ).backward()
        )
        compiled, head.COMPILED_ON = head.COMPILED_ON, ()
        plain = self.seconds(
            lambda: (
                score(hidden, weight, targets, [HeadSegment(num_tokens=tokens)])[0].sum().backward()
            )
        )
        head.COMPILED_ON = compiled
        return {"head_ratio": round(full / ours, 3), "fused_head_ratio": round(plain / ours, 3)}


def compute(worker: TorchWorker, parts: Sequence[tuple[str, Columns]]) -> None:
    calls = tuple(
        PartCall(model_id=name, rows=tuple(range(c.num_rows)), columns=c, loss=CALL)
        for name, c in parts
    )
    outputs = worker.forward_backward(calls, False)
    assert all(
        isinstance(output, RowOutput) and np.isfinite(output.values).all() for output in outputs
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tiny", action="store_true", help="small shapes, to try the script on any machine"
    )
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        raise SystemExit(
            "this machine has no CUDA device; --tiny runs the script with small shapes"
        )
    bench = Bench(options.tiny)
    result = bench.lora() | bench.heads() | bench.full()
    if options.tiny:
        print(json.dumps({"bench": "gpu_train", **result}))  # the figures mean nothing
        return
    emit("gpu_train", result | {"device": torch.cuda.get_device_name()})


if __name__ == "__main__":
    main()
