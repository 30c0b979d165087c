"""TRL's SFTTrainer with peft, and a worker, with the same adapter shape and order of rows.

A step has 16 rows, and a microbatch 4.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.train_setup import (
    LAYERS,
    THREADS,
    columns_of,
    compute,
    plain_model,
    ragged,
    rows_of,
    tenants,
    tokens_in,
    worker_of,
)
from skyrl_actors.messages.model import AdamParams

ROWS = 16


def compare(base: Path, rounds: int) -> dict[str, Any]:
    """Return the seconds of each step, without the first, which is a warm-up.

    The two run one after the other, because the trainer's loop cannot be interleaved.
    """
    data = [rows_of(i, ragged(7, ROWS)) for i in range(rounds + 1)]
    theirs = _trainer_steps(base, [row for rows in data for row in rows], rounds + 1)
    worker = worker_of(base)
    (name,) = tenants(worker, 1)
    ours = []
    for rows in data:
        started = time.perf_counter()
        compute(worker, [(name, columns_of(rows))])
        worker.optim_step(name, AdamParams(learning_rate=1e-4))
        ours.append(time.perf_counter() - started)
    tokens = tokens_in(data[0])
    rates = {
        way: tokens / statistics.median(steps[1:])
        for way, steps in (("trl", theirs), ("worker", ours))
    }
    return {
        "trl_ratio": round(rates["worker"] / rates["trl"], 3),
        "trl": {f"{way}_tokens_per_s": round(rate) for way, rate in rates.items()},
    }


def _trainer_steps(base: Path, rows: list[Any], steps: int) -> list[float]:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    import pyarrow
    import torch
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]  optional

    from skyrl_actors.workers.tiny_base import make_tokenizer

    torch.set_num_threads(THREADS)
    lists = [row.tolist() for row in rows]
    table = InMemoryTable(pyarrow.table({"input_ids": lists, "labels": lists}))
    found: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            found.append(time.perf_counter() - self.started)

    with tempfile.TemporaryDirectory() as scratch:
        config = SFTConfig(
            output_dir=scratch,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=ROWS // 4,
            max_steps=steps,
            max_length=None,
            learning_rate=1e-4,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            use_cpu=True,
            bf16=False,
            shuffle_dataset=False,
            gradient_checkpointing=False,
            optim="adamw_torch_fused",
            disable_tqdm=True,
            train_sampling_strategy="sequential",
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        trainer = SFTTrainer(
            model=plain_model(base),
            args=config,
            # a fixed name, so that none is computed by pickling
            train_dataset=Dataset(table, fingerprint="rows"),
            processing_class=make_tokenizer(),
            peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=LAYERS, lora_dropout=0.0),
            callbacks=[Clock()],
        )
        trainer.train()
    return found
