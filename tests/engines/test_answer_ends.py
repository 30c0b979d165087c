"""Where an answer ends: at end tokens, token ids and texts, of which some are special tokens."""

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from skyrl_actors.engines import jax_samples
from skyrl_actors.engines.answer_ends import Decode, decode_of, end_ids_of
from skyrl_actors.engines.vllm_samples import vllm_params
from skyrl_actors.engines.vllm_server import completion_body
from skyrl_actors.messages.requests import SamplingParams

END = "<|im_end|>"


def ends_of(params: SamplingParams, decode: Decode | None) -> Any:
    """Return what finds the end of a JAX engine's answer."""
    params = SamplingParams(max_tokens=params.max_tokens, stop=params.stop, seed=1)
    (draw,) = jax_samples.draws_of("r", (1,), params, None, frozenset(), decode, 10**6, 10**6)
    return draw.ends


@pytest.fixture(scope="module")
def tokenizer(random_base: Path) -> Any:
    return AutoTokenizer.from_pretrained(random_base)


def test_a_special_token_is_a_stop_text_of_a_jax_engine(random_base: Path, tokenizer: Any):
    drawn = tokenizer.encode(f"an answer{END}and more")
    ends = ends_of(SamplingParams(max_tokens=100, stop=(END,)), decode_of(random_base))
    at = drawn.index(tokenizer.convert_tokens_to_ids(END))
    assert ends(drawn[:at], 0) is None and ends(drawn, at) == at + 1


def test_a_special_token_is_a_stop_text_of_vllm(tokenizer: Any):
    params = SamplingParams(max_tokens=100, stop=(END,))
    request: Any = SimpleNamespace(
        request_id="r", sampling_params=vllm_params(params), prompt_token_ids=[1, 2]
    )
    reader = IncrementalDetokenizer.from_new_request(tokenizer, request)
    drawn = tokenizer.encode(f"an answer{END}and more")
    found = [reader.update([token], False) for token in drawn]
    assert found.index(END) == drawn.index(tokenizer.convert_tokens_to_ids(END))


def test_a_server_by_url_is_asked_to_look_at_special_tokens():
    body = completion_body("m", (1,), SamplingParams(max_tokens=1, stop=(END,)))
    assert body["stop"] == [END] and body["skip_special_tokens"] is False


@pytest.mark.parametrize("seed", range(20))
def test_the_end_of_a_long_answer_is_found_as_in_its_whole_text(
    random_base: Path, tokenizer: Any, seed: int
):
    """Steps of a JAX engine bring several tokens at once; each byte of a character is a token."""
    rng = random.Random(seed)
    texts = ("aé", "\U0001f600b", "c", "abcabc", END)
    stop = tuple(rng.sample(texts, rng.randint(1, 3)))
    words = (*"abcé\U0001f600", "ab", "aé", "\U0001f600", END)
    drawn = tokenizer.encode("".join(rng.choice(words) for _ in range(60)) + stop[0])
    decode = decode_of(random_base)
    assert decode is not None
    wanted = next(
        count
        for count in range(1, len(drawn) + 1)
        if any(text in decode(drawn[:count]) for text in stop)
    )
    ends, found, size = ends_of(SamplingParams(max_tokens=10**4, stop=stop), decode), None, 0
    while found is None:
        before, size = size, size + rng.randint(1, 8)
        found = ends(drawn[:size], before)
    assert found == wanted


def test_an_answer_is_not_decoded_as_a_whole_again_and_again(random_base: Path):
    decode, lengths = decode_of(random_base), list[int]()
    assert decode is not None

    def counted(tokens: Sequence[int]) -> str:
        lengths.append(len(tokens))
        return decode(tokens)

    ends = ends_of(SamplingParams(max_tokens=10**4, stop=("\n\nUser:",)), counted)
    drawn = [97] * 4000
    for size in range(8, len(drawn) + 1, 8):
        assert ends(drawn[:size], size - 8) is None
    assert len(lengths) == 500 and max(lengths) <= 60


@pytest.mark.parametrize(
    ("of_config", "generation", "wanted"),
    [
        (3, None, {3}),
        ([3, 4], None, {3, 4}),
        (None, {"eos_token_id": [5, 6]}, {5, 6}),
        (3, {"eos_token_id": 5}, {5}),
        (3, {"temperature": 0.6}, {3}),
        (None, None, set()),
    ],
)
def test_end_tokens_are_those_of_the_generation_config_and_of_the_tokenizer(
    of_config: Any,
    generation: dict[str, Any] | None,
    wanted: set[int],
    random_base: Path,
    tmp_path: Path,
    tokenizer: Any,
):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    config = SimpleNamespace(eos_token_id=of_config)
    assert end_ids_of(tmp_path, config) == wanted
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(random_base / name, tmp_path)
    assert end_ids_of(tmp_path, config) == wanted | {tokenizer.eos_token_id}
