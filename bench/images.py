"""What rows with images cost: a packed pass against its vision tower and its text apart.

    python -m bench.images [--rounds 10]

A worker of a random Qwen3-VL on the CPU in float32, with one adapter, forward and backward. 64
rows, each of one image of 128 x 128 pixels (64 tokens) and 64 tokens of text. Two models: the tiny
one, whose tower is a fifth of the work, and one whose text network is larger, so that the tower is
about as small a part of the work as in Qwen3-VL-4B. Measured in each round:

- images: the pass, with images that the worker has not seen, so it decodes and computes each;
- again: the same pass with kept features, as in a second epoch or for a second tenant;
- text: the same rows with text in the places of images;
- tower: transformers' processor and tower on all images in one batch. The worker computes each
  image alone, so that its features never depend on what else is in a pass.

Prints medians of ratios in the same round, then one JSON line.
"""

import argparse
import hashlib
import io
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from bench.harness import emit
from skyrl_actors import losses
from skyrl_actors.backends.base_models import base_model_folder
from skyrl_actors.config.base_models import TinyVlBase
from skyrl_actors.messages.columns import Columns, columns_from
from skyrl_actors.messages.example import Example
from skyrl_actors.messages.image_form import form_in
from skyrl_actors.messages.images import Picture
from skyrl_actors.messages.model import LoraSpec, ModelSpec
from skyrl_actors.workers.interface import PartCall, WorkerSpec
from skyrl_actors.workers.torch_worker import TorchWorker

ROWS, SIDE, TEXT_TOKENS = 64, 128, 64
LARGER = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6}
LOSS = losses.find("cross_entropy").checked({})


def images(seed: int) -> list[bytes]:
    """Return drawings of noise, each another one."""
    rng, found = np.random.default_rng(seed), list[bytes]()
    for _ in range(ROWS):
        content = io.BytesIO()
        pixels = rng.integers(0, 255, (SIDE, SIDE, 3), np.uint8)
        Image.fromarray(pixels).save(content, "JPEG")
        found.append(content.getvalue())
    return found


def rows_with(contents: list[bytes], folder: Path) -> Columns:
    form = form_in(folder)
    assert form is not None
    grid = form.grid(SIDE, SIDE)
    count = form.num_tokens(grid)
    rng, rows = np.random.default_rng(0), list[Example]()
    for content in contents:
        tokens = rng.integers(5, 60, TEXT_TOKENS + count).astype(np.int32)
        tokens[8 : 8 + count] = form.token
        digest = hashlib.sha256(content).hexdigest()
        fields = {"target_tokens": np.roll(tokens, -1), "weights": np.ones(len(tokens), np.float32)}
        rows.append(Example(tokens, fields, (Picture(8, digest, content, grid, count),)))
    return columns_from(rows)


def worker_on(folder: Path) -> TorchWorker:
    worker = TorchWorker(
        WorkerSpec(
            rank=0,
            world_size=1,
            base_folder=str(folder),
            dtype="float32",
            device="cpu",
            num_threads=os.cpu_count() or 1,
            collective_timeout_s=60.0,
            microbatch_tokens=4096,
            role="policy",
        )
    )
    worker.setup("127.0.0.1", 0)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny-vl", lora=LoraSpec(rank=8)))
    return worker


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measured(worker: TorchWorker, folder: Path, rounds: int) -> dict[str, list[float]]:
    tower: Any = cast(Any, worker)._model_factory.base.tower

    def train(columns: Columns) -> None:
        call = PartCall(model_id="m", rows=tuple(range(ROWS)), columns=columns, loss=LOSS)
        worker.forward_backward((call,), False)

    @torch.no_grad()
    def in_one_batch(contents: list[bytes]) -> None:
        found = [tower.pixels.of(content) for content in contents]
        values = torch.from_numpy(np.concatenate([pixels for pixels, _ in found]))
        tower._model.get_image_features(
            values, torch.tensor([grid for _, grid in found]), return_dict=True
        )

    took: dict[str, list[float]] = {"images": [], "again": [], "text": [], "tower": []}
    for number in range(rounds + 1):
        contents = images(number)
        columns = rows_with(contents, folder)
        text = replace(columns, images=None)
        found = {
            "images": seconds(lambda columns=columns: train(columns)),
            "again": seconds(lambda columns=columns: train(columns)),
            "text": seconds(lambda text=text: train(text)),
            "tower": seconds(lambda contents=contents: in_one_batch(contents)),
        }
        if number:  # the first round warms up
            for name, value in found.items():
                took[name].append(value)
    return took


def larger(tiny: Path, folder: Path) -> Path:
    """Make a model with the files of the tiny one and a larger text network."""
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config: Any = AutoConfig.from_pretrained(tiny)
    for name, value in LARGER.items():
        setattr(config.text_config, name, value)
    config.text_config.layer_types = ["full_attention"] * LARGER["num_hidden_layers"]
    config.vision_config.update({"out_hidden_size": LARGER["hidden_size"]})
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        tiny = base_model_folder(TinyVlBase(name="tiny-vl", warmup_steps=0), lambda count: [])
        bases = {"tiny": tiny, "larger": larger(tiny, Path(cache) / "larger")}
        found = {
            name: measured(worker_on(folder), folder, arguments.rounds)
            for name, folder in bases.items()
        }
    print("| model | tower / text | images / (text + tower) | again / text |\n|---|---|---|---|")
    for name, took in found.items():
        images, again, text, tower = (np.asarray(values) for values in took.values())
        ratios = (tower / text, images / (text + tower), again / text)
        print(f"| {name} | " + " | ".join(f"{np.median(ratio):.2f}" for ratio in ratios) + " |")
    emit("images", {"seconds": found})


if __name__ == "__main__":
    main()
