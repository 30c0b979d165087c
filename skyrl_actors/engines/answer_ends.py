"""What a JAX engine must know of a base model to find where an answer ends."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

Decode = Callable[[Sequence[int]], str]  # with special tokens, because a stop text can be one


def decode_of(folder: Path) -> Decode | None:
    """Return the decoder of the base model in `folder`; None if it has no tokenizer."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    tokenizer = Tokenizer.from_file(str(file))
    return lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=False)


def end_ids_of(folder: Path, config: Any) -> frozenset[int]:
    """Return the end tokens of the base model in `folder`, as vLLM finds them.

    These are the tokenizer's end of text, and those of generation_config.json or, if it names none,
    of the model's own config.
    """
    file = folder / "generation_config.json"
    found = _ids(json.loads(file.read_text()).get("eos_token_id")) if file.is_file() else []
    return frozenset(found or _ids(getattr(config, "eos_token_id", None))) | _of_tokenizer(folder)


def _ids(found: int | list[int] | None) -> list[int]:
    return [found] if isinstance(found, int) else found or []


def _of_tokenizer(folder: Path) -> frozenset[int]:
    if not (folder / "tokenizer_config.json").is_file():
        return frozenset()
    from transformers import AutoTokenizer

    tokenizer: Any = cast(Any, AutoTokenizer).from_pretrained(folder)
    return frozenset(_ids(tokenizer.eos_token_id))
