"""Base models with a vision tower that vLLM serves on a CPU, with a tokenizer and processors."""

import copy
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import (
    AutoModelForImageTextToText,
    Qwen2_5_VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from skyrl_actors.workers.tiny_base import make_tokenizer
from tests.workers import vision_models
from tests.workers.vision_models import MERGE, PATCH

MARKS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
PROCESSORS: dict[str, Any] = {
    "qwen3_vl": (Qwen3VLProcessor, Qwen3VLVideoProcessor),
    "qwen3_5": (Qwen3VLProcessor, Qwen3VLVideoProcessor),
    "qwen2_5_vl": (Qwen2_5_VLProcessor, Qwen2VLVideoProcessor),
}
SECTIONS = {"qwen3_5": [2, 1, 1], "qwen3_vl": [8, 4, 4], "qwen2_5_vl": [4, 6, 6]}
WIDTH = 64


def make(kind: str, folder: Path) -> Path:
    """Save a random model. vLLM's kernels on a CPU take heads of 32 and more."""
    tokenizer: Any = make_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=True) for text in MARKS.values()])
    config: Any = copy.deepcopy(vision_models.MODELS[kind])
    for name, text in MARKS.items():
        setattr(config, name, tokenizer.convert_tokens_to_ids(text))
    text, tower = config.text_config, config.vision_config
    text.vocab_size, text.hidden_size, text.head_dim = 320, WIDTH, 32
    text.num_attention_heads, text.num_key_value_heads = 2, 1
    text.rope_parameters["mrope_section"] = SECTIONS[kind]
    if kind == "qwen3_5":
        text.linear_key_head_dim = text.linear_value_head_dim = 128
    tower.update({"out_hidden_size": WIDTH, "hidden_size": WIDTH})
    torch.manual_seed(0)
    model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    size = {"shortest_edge": 64, "longest_edge": 4096}
    processor, video = PROCESSORS[kind]
    processor(
        image_processor=Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, size=size),
        tokenizer=tokenizer,
        video_processor=video(patch_size=PATCH, merge_size=MERGE),
    ).save_pretrained(folder)
    return folder
