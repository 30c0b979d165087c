"""The frozen base: how it is loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, modeling_utils

from skyrl_actors.workers.base_model import BaseModel


def test_weights_are_loaded_without_one_block_for_all_of_them(
    random_base: Path, monkeypatch: pytest.MonkeyPatch
):
    """transformers would call this function for a device; it must exist in this release."""
    library: Any = modeling_utils
    called: list[str] = []
    monkeypatch.setattr(library, "caching_allocator_warmup", lambda *_: called.append("allocated"))
    right = AutoModelForCausalLM.from_pretrained

    def loaded(*given: Any, **named: Any) -> Any:
        library.caching_allocator_warmup(None, {}, None)
        return right(*given, **named)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loaded)
    made = BaseModel(str(random_base), torch.float32, torch.device("cpu"))
    assert called == [] and made.own
    library.caching_allocator_warmup(None, {}, None)
    assert called == ["allocated"]  # it is in place again
