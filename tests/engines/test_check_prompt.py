"""The logprob check's prompt: a natural text that fits, whatever tokenizer the base has."""

import json
from pathlib import Path

import pytest

from skyrl_actors.api.pictures import PictureReader
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.limits import LimitsConfig
from skyrl_actors.engines.check_image import pictures_in
from skyrl_actors.engines.check_prompt import (
    CONTINUED_TOKENS,
    OPENING_TOKENS,
    TEXT,
    continuation,
    fixed_prompt,
    opening,
)
from skyrl_actors.messages.image_form import form_in
from skyrl_actors.workers.tiny_base import make_tokenizer


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    make_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_the_opening_is_the_text_in_the_base_models_tokens(base: Path):
    tokens = opening(base, 300, 4096)
    assert len(tokens) == OPENING_TOKENS
    assert TEXT.startswith(make_tokenizer().decode(list(tokens)))


def test_without_a_tokenizer_the_opening_is_random_but_fixed(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    assert opening(tmp_path, 300, 4096) == fixed_prompt(300, 4096) == fixed_prompt(300, 4096)


def test_ids_beyond_the_models_vocabulary_are_not_used(base: Path):
    assert opening(base, 40, 4096) == fixed_prompt(40, 4096)


@pytest.mark.parametrize("max_model_len", [8, 16, 64, 65, 66, 4096])
def test_prompt_and_continuation_leave_room_for_the_token_that_scoring_samples(
    base: Path, max_model_len: int
):
    prompt = opening(base, 300, max_model_len)
    how = continuation(prompt, max_model_len)
    assert len(prompt) + how.max_tokens + 1 <= max_model_len
    assert 1 <= how.max_tokens <= CONTINUED_TOKENS and how.temperature == 0 and how.stop == ()


def test_a_base_that_takes_images_has_one_before_the_text(base: Path):
    tokens = {"image_token_id": 7, "vision_start_token_id": 5, "vision_end_token_id": 6}
    (base / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", **tokens}))
    settings = {"patch_size": 8, "merge_size": 2, "min_pixels": 1024, "max_pixels": 4096}
    (base / "preprocessor_config.json").write_text(json.dumps(settings))
    form = form_in(base)
    prompt = opening(base, 300, 4096)
    (picture,) = pictures_in(prompt, form)
    image = (5, *[7] * picture.num_tokens, 6)
    assert picture.place == 1 and prompt[: len(image)] == image
    assert prompt[len(image) :] == opening(base, 300, 4096, with_image=False)
    reader = PictureReader(form, LimitsConfig())
    assert reader.read("", 1, picture.content, "png", None) == picture
    assert opening(base, 300, 16) == opening(base, 300, 16, with_image=False)  # no room
    assert not pictures_in(prompt[len(image) :], form) and not pictures_in(prompt, None)
    assert 7 not in fixed_prompt(8, 4096, 7) and 7 in fixed_prompt(8, 4096)


@pytest.mark.parametrize(
    ("policy", "engine", "quantized", "bound"),
    [
        ("float32", "float32", False, 1e-4),
        ("bfloat16", "float32", False, 0.03),
        ("float32", "bfloat16", False, 0.03),
        ("bfloat16", "bfloat16", True, 0.1),
    ],
)
def test_the_bound_follows_the_coarser_dtype(
    policy: str, engine: str, quantized: bool, bound: float
):
    config = ClusterConfig.model_validate(
        {
            "policy": {"dtype": policy},
            "engine": {"dtype": engine, "vllm": {"quantization": "fp8"} if quantized else {}},
        }
    )
    assert config.logprob_bound() == bound
    pinned = config.model_copy(
        update={"logprob_check": config.logprob_check.model_copy(update={"bound": 0.5})}
    )
    assert pinned.logprob_bound(quantized_base=True) == 0.5
