"""Models, data and loops of the training benchmark, for plain torch and for a worker."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3Config

from skyrl_actors import losses
from skyrl_actors.messages.columns import Columns, columns_from
from skyrl_actors.messages.example import TARGETS, Example
from skyrl_actors.messages.model import LoraSpec, ModelSpec
from skyrl_actors.workers.interface import PartCall, RowOutput, WorkerSpec
from skyrl_actors.workers.torch_worker import TorchWorker

THREADS = 2
CALL = losses.find("cross_entropy").checked({})
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def config_of(vocab_size: int, layers: int) -> Qwen3Config:
    """Return the config of a model of width 512.

    It has 50.6 million weights with 16 layers and a vocabulary of 512.
    """
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=65536,
        tie_word_embeddings=True,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=None,
    )


@contextmanager
def folder_of(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> Iterator[Path]:
    """Create the model with random weights. Return its folder."""
    with tempfile.TemporaryDirectory(prefix="bench-base-") as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
        yield Path(folder)


@contextmanager
def base_of(vocab_size: int = 512, layers: int = 16) -> Iterator[Path]:
    with folder_of(config_of(vocab_size, layers)) as folder:
        yield folder


def rows_of(seed: int, lengths: Sequence[int], vocab_size: int = 512) -> list[np.ndarray]:
    """Return rows with one token more than their length.

    Inputs are a row without its last token, and targets are a row without its first.
    """
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, n + 1) for n in lengths]


def ragged(seed: int, count: int = 16) -> list[int]:
    """Return log-uniform lengths of 32 to 512, in random order."""
    rng = np.random.default_rng(seed)
    return np.exp(rng.uniform(np.log(32), np.log(512), count)).astype(int).tolist()


def columns_of(rows: Sequence[np.ndarray], prompts: bool = False) -> Columns:
    """Return the columns of these rows. With `prompts`, the first half of a row has weight 0."""

    def weights(count: int) -> np.ndarray:
        return (np.arange(count) >= (count // 2 if prompts else 0)).astype(np.float32)

    return columns_from(
        [
            Example(
                row[:-1].astype(np.int32),
                {TARGETS: row[1:].astype(np.int32), "weights": weights(len(row) - 1)},
            )
            for row in rows
        ]
    )


def tokens_in(rows: Sequence[np.ndarray]) -> int:
    return sum(len(row) - 1 for row in rows)


def plain_model(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).train()


def plain_loop(
    model: Any, rows: Sequence[np.ndarray], per_pass: int, prompts: bool = False
) -> float:
    """Run padded microbatches and accumulate gradients. Return the sum of the losses.

    A microbatch is padded to its longest row.
    """
    total = 0.0
    for start in range(0, len(rows), per_pass):
        some = rows[start : start + per_pass]
        width = max(len(row) for row in some) - 1
        tokens = torch.zeros(len(some), width, dtype=torch.int64)
        targets = torch.full((len(some), width), -100)
        mask = torch.zeros(len(some), width, dtype=torch.int64)
        for i, row in enumerate(some):
            n = len(row) - 1
            skip = n // 2 if prompts else 0
            tokens[i, :n], mask[i, :n], targets[i, skip:n] = (
                torch.tensor(row[:-1]),
                1,
                torch.tensor(row[1 + skip :]),
            )
        padded = None if bool(mask.all()) else mask
        logits = model(input_ids=tokens, attention_mask=padded, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss.backward()
        total += loss.item()
    return total


def worker_of(
    base: Path, budget: int = 1024, kind: type[TorchWorker] = TorchWorker, **options: Any
) -> TorchWorker:
    spec = WorkerSpec(
        role="policy",
        rank=0,
        world_size=1,
        base_folder=str(base),
        dtype=options.pop("dtype", "float32"),
        device="cpu",
        num_threads=THREADS,
        microbatch_tokens=budget,
        collective_timeout_s=600.0,
        **options,
    )
    worker = kind(spec)
    worker.setup("127.0.0.1", 0)
    return worker


def tenants(worker: TorchWorker, count: int, unembed: bool = False) -> list[str]:
    names = [f"t{i}" for i in range(count)]
    for i, name in enumerate(names):
        worker.create_model(
            ModelSpec(
                model_id=name,
                base_model="m50",
                lora=LoraSpec(rank=8, alpha=16.0, train_unembed=unembed),
                seed=i,
            )
        )
    return names


def compute(worker: TorchWorker, parts: Sequence[tuple[str, Columns]]) -> float:
    """Run one call with all rows. Return the sum of the losses."""
    calls = tuple(
        PartCall(model_id=name, rows=tuple(range(c.num_rows)), columns=c, loss=CALL)
        for name, c in parts
    )
    outputs = worker.forward_backward(calls, False)
    assert all(isinstance(output, RowOutput) for output in outputs), outputs
    return sum(output.sums["loss:sum"] for output in outputs if isinstance(output, RowOutput))


def seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def side_by_side(ways: dict[str, Callable[[int], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each way in alternating rounds, after a warm-up round."""
    for work in ways.values():
        work(0)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, work in ways.items():
            found[name].append(seconds(lambda work=work, number=number: work(number + 1)))
    return found


def peak_of(work: Callable[[], Any]) -> int:
    """Return the peak memory of `work` in bytes, beyond the present use.

    It must run in a separate process.
    """
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(field)
    )
    return int(line.split()[1]) * 1024
