"""Create a tiny base model, and train it briefly on given chats.

It has a Qwen3-shaped network of two million weights, or as a mixture of experts of twenty million,
or with a vision tower; a byte-level tokenizer and a chat template. It runs as a separate process,
so that its memory is freed when it ends.

    python -m skyrl_actors.workers.tiny_base FOLDER CHATS.jsonl --steps 100 --seed 0 --kind tiny

Progress goes to standard output, one JSON object a line: {"step": 10, "steps": 100, "loss": 1.2}.
"""

import argparse
import base64
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from skyrl_actors.workers import tiny_vision

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Row = tuple[list[int], int, bytes | None]  # tokens, length of the prompt, image
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
KINDS = ("tiny", "tiny_moe", "tiny_vl")
BATCH_ROWS = 64
LEARNING_RATE = 2e-3
EXPERTS: dict[str, Any] = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 64,
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Create a tokenizer: one token a byte (ids 0 to 255), the chat marks, and the role names."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in (END_OF_TEXT, START, END)]
    )
    tokenizer.add_tokens(
        [AddedToken(f"{role}\n", special=False) for role in ("system", "user", "assistant")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )


def shape_for(vocab_size: int, end_id: int) -> dict[str, Any]:
    """Return the shape of the text network, for at least `vocab_size` tokens."""
    return {
        "vocab_size": -(-vocab_size // 64) * 64,
        "hidden_size": 192,
        "intermediate_size": 640,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": end_id,
        "bos_token_id": None,
    }


def make_model(kind: str, shape: dict[str, Any], tokenizer: Any) -> PreTrainedModel:
    """Return a model with random weights."""
    if kind == "tiny_vl":
        return tiny_vision.make_model(shape, tokenizer)
    if kind == "tiny_moe":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **EXPERTS))
    return Qwen3ForCausalLM(Qwen3Config(**shape))


def warm_up(model: PreTrainedModel, rows: Sequence[Row], steps: int) -> None:
    """Train next-token prediction on the answers."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    for step in range(steps):
        batch = rows[step * BATCH_ROWS : (step + 1) * BATCH_ROWS]
        tokens, targets = _batch(batch)
        images = tiny_vision.inputs(model, tokens, [image for _, _, image in batch if image])
        rate = LEARNING_RATE * min(1.0, (step + 1) / 30) * (1 - 0.9 * step / steps)
        optimizer.param_groups[0]["lr"] = rate
        logits = model(input_ids=tokens, use_cache=False, **images).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4 or step == steps - 1:
            print(
                json.dumps({"step": step + 1, "steps": steps, "loss": round(loss.item(), 3)}),
                flush=True,
            )


def _batch(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    width = max(len(tokens) for tokens, _, _ in rows) - 1
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    targets = torch.full((len(rows), width), -100)
    for i, (row, prompt, _) in enumerate(rows):
        tokens[i, : len(row) - 1] = torch.tensor(row[:-1])
        targets[i, prompt - 1 : len(row) - 1] = torch.tensor(row[prompt:])
    return tokens, targets


def row_of(chat: dict[str, str], tokenizer: Any) -> Row:
    """Return the row of a chat."""
    image = base64.b64decode(chat["image"]) if "image" in chat else None
    question: Any = chat["question"]
    if image is not None:
        question = [{"type": "image"}, {"type": "text", "text": question}]
    prompt = str(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
    )
    if image is not None:
        prompt = prompt.replace(tiny_vision.IMAGE, tiny_vision.IMAGE * tiny_vision.tokens_of(image))
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    answer_ids = tokenizer.encode(chat["answer"] + END, add_special_tokens=False)
    return prompt_ids + answer_ids, len(prompt_ids), image


def make(folder: Path, chats: Path, steps: int, seed: int, kind: str) -> None:
    """Create, train and save the model."""
    tokenizer = make_tokenizer()
    if kind == "tiny_vl":
        tiny_vision.add_marks(tokenizer)
    end_id = tokenizer.convert_tokens_to_ids(END)
    assert isinstance(end_id, int)
    torch.manual_seed(seed)
    model = make_model(kind, shape_for(len(tokenizer), end_id), tokenizer)
    rows = [row_of(json.loads(line), tokenizer) for line in chats.read_text().splitlines()]
    warm_up(model, rows, steps)
    staging = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    model.save_pretrained(staging)
    if kind == "tiny_vl":
        tiny_vision.save_processor(tokenizer, staging)
    else:
        tokenizer.save_pretrained(staging)
    staging.rename(folder)


def main() -> None:
    """Create the model that the command line describes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("chats", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0])
    chosen = parser.parse_args()
    make(chosen.folder, chosen.chats, chosen.steps, chosen.seed, chosen.kind)


if __name__ == "__main__":
    main()
