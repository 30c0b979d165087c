"""What packing costs layers with a state: rows in one pass against each row in a pass of its own.

    python -m bench.hybrids [--rounds 10]

Small random models on the CPU in float32, with the trainer's network, forward and backward. Eight
rows, either of 128 tokens each, or of eight lengths from 40 to 256. The base is transformers' own
module with one row at a time, without any part of this project.

Prints a table of speeds against that base in the same round, then one JSON line.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.harness import emit
from bench.served_families import FAMILIES, config_of
from skyrl_actors.workers.base_model import BaseModel
from skyrl_actors.workers.blocks import Block
from skyrl_actors.workers.network import PassInputs, Segment

NAMES = ("Qwen3-Next", "Nemotron-H", "Falcon-H1", "LFM2")
WIDTH = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 512}
ROWS = {"equal": (128,) * 8, "ragged": (40, 64, 72, 96, 128, 160, 208, 256)}
VOCAB = 512


def one_row_each(model: Any, rows: list[Tensor]) -> None:
    for row in rows:
        logits = model(inputs_embeds=embedded(model, row[None]), use_cache=False).logits[0]
        logprobs = logits.log_softmax(-1).gather(1, row.roll(-1)[:, None])
        logprobs.sum().backward()


def embedded(model: Any, tokens: Tensor) -> Tensor:
    """Return embeddings with a gradient, so that frozen layers compute theirs."""
    found: Tensor = model.get_input_embeddings()(tokens)
    return found.detach().requires_grad_()


def packed(network: BaseModel, rows: list[Tensor]) -> None:
    blocks: list[Block] = []
    for length in sorted({len(row) for row in rows}):
        count = sum(len(row) == length for row in rows)
        blocks.append(Block(blocks[-1].stop if blocks else 0, count, length))
    tokens = torch.cat(sorted(rows, key=len))
    segments = (Segment(len(tokens), {}, 1.0),)
    inputs = PassInputs(
        tokens=tokens,
        positions=torch.cat(
            [torch.arange(block.length).repeat(block.num_rows) for block in blocks]
        ),
        blocks=tuple(blocks),
        segments=segments,
        targets=torch.cat([row.roll(-1) for row in sorted(rows, key=len)]),
        counted=None,
    )
    with network.in_use(segments):
        network.predict(inputs)[0].sum().backward()


def seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measured(family: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    torch.manual_seed(0)
    config = config_of(family)
    for name, value in WIDTH.items():
        setattr(config, name, value)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        network = BaseModel(str(Path(folder)), torch.float32, torch.device("cpu"))
        plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    network.same_graph = True  # computes the gradient of each layer
    plain.requires_grad_(False)
    found: dict[str, dict[str, list[float]]] = {}
    for name, lengths in ROWS.items():
        rows = [torch.randint(0, VOCAB, (length,)) for length in lengths]
        took: dict[str, list[float]] = {"alone": [], "packed": []}
        for number in range(rounds + 1):
            pair = {
                "alone": seconds(lambda rows=rows: one_row_each(plain, rows)),
                "packed": seconds(lambda rows=rows: packed(network, rows)),
            }
            if number:  # the first round warms up
                for key, value in pair.items():
                    took[key].append(value)
        found[name] = took
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", default=",".join(NAMES), help="names of families")
    arguments = parser.parse_args()
    families = {
        name: measured(name, arguments.rounds)
        for name in FAMILIES
        if name in arguments.only.split(",")
    }
    print("| family | " + " | ".join(ROWS) + " |\n|---|---|---|")
    for family, cases in families.items():
        speeds = [
            statistics.median(a / b for a, b in zip(took["alone"], took["packed"], strict=True))
            for took in cases.values()
        ]
        print(f"| {family} | " + " | ".join(f"{speed:.2f} ×" for speed in speeds) + " |")
    emit("hybrids", {"seconds": families})


if __name__ == "__main__":
    main()
