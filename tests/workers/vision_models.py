"""Small random models with a vision tower, and batches with images."""

import hashlib
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from skyrl_actors.messages.columns import Columns, columns_from
from skyrl_actors.messages.example import TARGETS, Example
from skyrl_actors.messages.images import Images
from tests.workers.tiny_models import DELTA_NET

TEXT = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
    "initializer_range": 0.1,
}
TOKENS = {
    "image_token_id": 150,
    "video_token_id": 151,
    "vision_start_token_id": 152,
    "vision_end_token_id": 153,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 48,
}
DEEPSTACK = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
INTERLEAVED = {
    "head_dim": 16,
    "rope_parameters": ROPE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True},
}
HYBRID = DELTA_NET | {
    "head_dim": 32,
    "rope_parameters": ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
UNTIED: dict[str, Any] = {"tie_word_embeddings": False} | TOKENS
MODELS: dict[str, Any] = {
    "qwen3_vl": Qwen3VLConfig(
        text_config=TEXT | INTERLEAVED,
        vision_config=TOWER | DEEPSTACK,
        tie_word_embeddings=True,
        **TOKENS,
    ),
    "qwen3_vl_moe": Qwen3VLMoeConfig(
        text_config=TEXT | INTERLEAVED | EXPERTS, vision_config=TOWER | DEEPSTACK, **UNTIED
    ),
    "qwen3_5": Qwen3_5Config(
        text_config=TEXT | HYBRID, vision_config=TOWER | {"num_position_embeddings": 64}, **UNTIED
    ),
    "qwen3_5_moe": Qwen3_5MoeConfig(
        text_config=TEXT | HYBRID | EXPERTS | {"shared_expert_intermediate_size": 32},
        vision_config=TOWER | {"num_position_embeddings": 64},
        **UNTIED,
    ),
    "qwen2_5_vl": Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_parameters": ROPE | {"mrope_section": [2, 2, 2]}},
        vision_config=TOWER | {"window_size": 16, "fullatt_block_indexes": [1]},
        **UNTIED,
    ),
}
PATCH = 4  # pixels on each side
MERGE = 2
Part = int | tuple[int, int, int]  # a length of text, or the grid of an image


def make(kind: str, folder: Path) -> Path:
    """Save a random model."""
    torch.manual_seed(0)
    model: Any = AutoModelForImageTextToText.from_config(MODELS[kind], dtype=torch.float32)
    model.save_pretrained(folder)
    size = {"shortest_edge": 64, "longest_edge": 4096}
    Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, size=size).save_pretrained(folder)
    return folder


def num_tokens(grid: tuple[int, int, int]) -> int:
    return int(np.prod(grid)) // MERGE**2


def batch(seed: int, rows: Sequence[Sequence[Part]]) -> Columns:
    """Return a batch. Rows consist of texts and images."""
    random = np.random.default_rng(seed)
    examples: list[Example] = []
    starts, counts, which = list[int](), list[int](), list[int]()
    images: dict[bytes, tuple[int, int, int]] = {}
    offset = 0
    for parts in rows:
        tokens: list[int] = []
        for part in parts:
            if isinstance(part, int):
                tokens += random.integers(2, 140, part).tolist()
                continue
            content = png(random, part)
            starts.append(offset + len(tokens))
            counts.append(num_tokens(part))
            which.append(len(images))
            images[content] = part
            tokens += [TOKENS["image_token_id"]] * num_tokens(part)
        tokens.append(int(random.integers(2, 140)))
        inputs = np.asarray(tokens, np.int32)
        examples.append(Example(inputs[:-1], {TARGETS: inputs[1:]}))
        offset += len(inputs) - 1
    columns = columns_from(examples)
    if not starts:
        return columns
    found = Images(
        starts=np.asarray(starts),
        counts=np.asarray(counts),
        which=np.asarray(which),
        grids=np.asarray(list(images.values())),
        digests=tuple(hashlib.sha256(content).hexdigest() for content in images),
        contents=tuple(images),
    )
    return replace(columns, images=found)


def png(random: np.random.Generator, grid: tuple[int, int, int]) -> bytes:
    """Return an image of noise that has this grid."""
    content, (_, h, w) = io.BytesIO(), grid
    values = random.integers(0, 256, (h * PATCH, w * PATCH, 3), np.uint8)
    Image.fromarray(values).save(content, "PNG")
    return content.getvalue()
