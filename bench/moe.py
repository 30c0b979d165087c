"""Adapters on routed experts: seconds of a training pass with and without them, in turns.

    python -m bench.moe [--rounds N]

A mixture with 128 experts, 8 of them for each token, on the CPU in float32. Rows of 256 tokens,
2,048 tokens a pass, packed as the trainer packs them; forward and backward by one network:

- transformers: no adapter, and the experts computed by transformers' own code; the backward pass
  goes to the embeddings.
- base: no adapter.
- attention: one adapter of rank 8 on attention alone.
- one, two, eight: adapters of rank 8 on every layer, of as many models, with equal shares of rows.

Prints a table of medians and of speeds against the first two in the same round, then one JSON line.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from bench.harness import emit
from skyrl_actors.messages.model import LoraSpec
from skyrl_actors.workers.adapter_terms import chosen, is_experts
from skyrl_actors.workers.base_model import BaseModel
from skyrl_actors.workers.blocks import Block
from skyrl_actors.workers.network import PassInputs, Segment

ROWS, LENGTH, VOCAB = 8, 256, 512
CONFIG = Qwen3MoeConfig(
    vocab_size=VOCAB,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=64,
    max_position_embeddings=512,
)
EVERYTHING, ATTENTION = LoraSpec(rank=8), LoraSpec(rank=8, train_mlp=False, train_unembed=False)
PLAIN = "transformers"
CASES: dict[str, tuple[int, LoraSpec | None]] = {
    PLAIN: (1, None),
    "base": (1, None),
    "attention": (1, ATTENTION),
    "one": (1, EVERYTHING),
    "two": (2, EVERYTHING),
    "eight": (8, EVERYTHING),
}


def network_in(folder: Path) -> BaseModel:
    network = BaseModel(str(folder), torch.float32, torch.device("cpu"))
    network.same_graph = True  # the base, too, computes a gradient in each layer
    return network


def with_plain_experts(network: BaseModel) -> BaseModel:
    for module in network.module.modules():
        if is_experts(module):
            del module.forward  # of this project; the method of its class remains
    return network


def adapter(network: BaseModel, lora: LoraSpec) -> dict[str, Tensor]:
    views: dict[str, Tensor] = {}
    for term in chosen(network.terms, lora):
        for key, shape in zip(
            (term.a, term.b), term.shapes(lora.rank, "shared_outer"), strict=True
        ):
            views[key] = (torch.randn(shape) * 0.02).requires_grad_()
            views[key].grad = torch.zeros(shape)  # as in the trainer, gradients are added to
    return views


def segments_of(network: BaseModel, models: int, lora: LoraSpec | None) -> tuple[Segment, ...]:
    tokens = ROWS * LENGTH // models
    return tuple(
        Segment(tokens, adapter(network, lora) if lora else {}, 4.0) for _ in range(models)
    )


def seconds(network: BaseModel, segments: tuple[Segment, ...], tokens: Tensor) -> float:
    inputs = PassInputs(
        tokens=tokens,
        positions=torch.arange(LENGTH).repeat(ROWS),
        blocks=(Block(0, ROWS, LENGTH),),
        segments=segments,
        targets=tokens.roll(-1),
        counted=None,
    )
    began = time.perf_counter()
    with network.in_use(segments):
        network.predict(inputs)[0].sum().backward()
    return time.perf_counter() - began


def measured(rounds: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).save_pretrained(folder)
        network = network_in(Path(folder))
        plain = with_plain_experts(network_in(Path(folder)))
        tokens = torch.randint(0, VOCAB, (ROWS * LENGTH,))
        cases = {name: segments_of(network, *case) for name, case in CASES.items()}
        found: dict[str, list[float]] = {name: [] for name in cases}
        for number in range(rounds + 1):
            for name, segments in cases.items():
                took = seconds(plain if name == PLAIN else network, segments, tokens)
                if number:  # the first round warms up
                    found[name].append(took)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    found = measured(parser.parse_args().rounds)
    print("| case | seconds | against transformers | against base |\n|---|---|---|---|")
    ratios: dict[str, dict[str, float]] = {}
    for name, times in found.items():
        ratios[name] = {
            other: statistics.median(
                base / own for base, own in zip(found[other], times, strict=True)
            )
            for other in (PLAIN, "base")
        }
        each = " | ".join(f"{ratio:.2f}" for ratio in ratios[name].values())
        print(f"| {name} | {statistics.median(times):.3f} | {each} |")
    emit("moe", {"seconds": found, "ratios": ratios})


if __name__ == "__main__":
    main()
