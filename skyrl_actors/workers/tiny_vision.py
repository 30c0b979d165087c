"""The parts of the tiny base model that concern images: its tower, tokens and processor."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import AddedToken
from torch import Tensor
from transformers import PreTrainedModel, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from skyrl_actors.messages.image_form import ImageForm

IMAGE = "<|image_pad|>"
MARKS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": IMAGE,
    "video_token_id": "<|video_pad|>",
}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PATCH, MERGE = 8, 2
LEAST, MOST = 32 * 32, 512 * 512  # pixels
FORM = ImageForm(token=0, patch=PATCH, merge=MERGE, least=LEAST, most=MOST)
TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_heads": 3,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}
ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [12, 10, 10],
    "mrope_interleaved": True,
}


def add_marks(tokenizer: Any) -> None:
    """Add the tokens around and in the place of images, and the chat template with images."""
    tokenizer.add_tokens([AddedToken(text, special=True) for text in MARKS.values()])
    tokenizer.chat_template = CHAT_TEMPLATE


def make_model(shape: dict[str, Any], tokenizer: Any) -> PreTrainedModel:
    """Return a model with random weights, whose text network has this shape."""
    text: dict[str, Any] = {**shape, "rope_parameters": ROPE}
    tied: bool = text.pop("tie_word_embeddings")
    ids: dict[str, Any] = {
        name: tokenizer.convert_tokens_to_ids(mark) for name, mark in MARKS.items()
    }
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config=text,
            vision_config=TOWER | {"out_hidden_size": shape["hidden_size"]},
            tie_word_embeddings=tied,
            **ids,
        )
    )


def processor() -> Qwen2VLImageProcessorPil:
    """Return the image processor of the tiny model."""
    size = {"shortest_edge": LEAST, "longest_edge": MOST}
    return Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, size=size)


def save_processor(tokenizer: Any, folder: Path) -> None:
    """Save the processor of text, images and videos. vLLM needs all of them."""
    Qwen3VLProcessor(
        image_processor=processor(),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(patch_size=PATCH, merge_size=MERGE),
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)


def tokens_of(image: bytes) -> int:
    """Return the number of tokens of an encoded image."""
    with Image.open(io.BytesIO(image)) as opened:
        return FORM.num_tokens(FORM.grid(*opened.size))


def inputs(model: PreTrainedModel, tokens: Tensor, images: Sequence[bytes]) -> dict[str, Tensor]:
    """Return the further inputs of a batch with these images, in the order of their tokens."""
    if not images:
        return {}
    opened = [Image.open(io.BytesIO(image)).convert("RGB") for image in images]
    found = processor()(images=opened, return_tensors="pt")
    placeholder: Any = model.config.image_token_id
    is_image = torch.eq(tokens, placeholder)
    return {
        "pixel_values": found["pixel_values"],
        "image_grid_thw": found["image_grid_thw"],
        "mm_token_type_ids": is_image.long(),
    }
