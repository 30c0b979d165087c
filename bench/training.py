"""Tokens per second of forward_backward and optim_step, through the service and in a plain loop.

The plain loop is PyTorch with peft. Base model, LoRA rank, batches and threads are the same, and
rounds alternate in one run. `service_ratio` is the ratio of the medians. `padded_baseline` is the
usual form of the loop, with one padded batch.
"""

import statistics
import time

import numpy as np
import tinker
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from tinker import types
from transformers import AutoModelForCausalLM

from bench.harness import base_folder, emit, service

ROUNDS, ROWS, RANK, THREADS = 7, 64, 8, 2
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def batch(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, n + 1) for n in rng.integers(16, 160, ROWS)]


def datum(row: np.ndarray) -> types.Datum:
    n = len(row) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(row[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=row[1:].tolist(), dtype="int64", shape=[n]),
            "weights": types.TensorData(data=[1.0] * n, dtype="float32", shape=[n]),
        },
    )


def plain_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: list[np.ndarray]
) -> None:
    width = max(len(row) for row in rows) - 1
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    targets = torch.full((len(rows), width), -100)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row) - 1], targets[i, : len(row) - 1] = (
            torch.tensor(row[:-1]),
            torch.tensor(row[1:]),
        )
        mask[i, : len(row) - 1] = 1
    logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    torch.set_num_threads(THREADS)
    base = AutoModelForCausalLM.from_pretrained(base_folder())
    lora = LoraConfig(r=RANK, lora_alpha=32, target_modules=LAYERS, lora_dropout=0.0)
    model = get_peft_model(base, lora).train()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True
    )
    ours, plain = [], []
    with (
        service("base_model.warmup_steps=0", f"policy.num_threads={THREADS}"),
        tinker.ServiceClient() as client,
    ):
        tenant = client.create_lora_training_client(
            "skyrl-actors/tiny", rank=RANK, train_unembed=False
        ).result()
        for i in range(ROUNDS + 2):
            rows = batch(i)
            data = [datum(row) for row in rows]
            count = sum(len(row) - 1 for row in rows)
            started = time.perf_counter()
            output, step = (
                tenant.forward_backward(data, "cross_entropy"),
                tenant.optim_step(types.AdamParams(learning_rate=1e-4)),
            )
            output.result()
            step.result()
            middle = time.perf_counter()
            plain_step(model, optimizer, rows)
            if i >= 2:
                ours.append(count / (middle - started))
                plain.append(count / (time.perf_counter() - middle))
    emit(
        "training",
        {
            "service_tokens_per_s": round(statistics.median(ours)),
            "plain_tokens_per_s": round(statistics.median(plain)),
            "service_ratio": round(statistics.median(ours) / statistics.median(plain), 3),
            "rows": ROWS,
            "lora_rank": RANK,
            "threads": THREADS,
            "rounds": ROUNDS,
            "padded_baseline": True,
        },
    )


if __name__ == "__main__":
    main()
