"""The text of a stream: equal to decoding all tokens at once, at a cost that does not grow."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from skyrl_actors.api.openai_text import Codec, GrowingText

WORDS = ["▁a", "▁the", "b", "c", "▁", "é", "한", "▁한", "!", "stop", "▁stop"]
VOCAB = {text: i for i, text in enumerate([*(f"<0x{i:02X}>" for i in range(256)), *WORDS])}
LLAMA = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)
DECODERS: dict[str, Any] = {
    "llama": LLAMA,
    "metaspace": decoders.Metaspace(),
    "wordpiece": decoders.WordPiece(cleanup=True),
}


class Counting(Codec):
    """A codec without a folder, which counts the tokens that it decodes."""

    def __init__(self, name: str):
        self._tokenizer = Tokenizer(models.BPE(VOCAB, [], byte_fallback=True))
        self._tokenizer.decoder = DECODERS[name]
        self.decoded = 0

    def decode(self, tokens: Sequence[int]) -> str:
        self.decoded += len(tokens)
        return super().decode(tokens)


def spoken(text: str) -> list[int]:
    """Return a text's bytes as tokens."""
    return [VOCAB[f"<0x{byte:02X}>"] for byte in text.encode()]


def pieces(tokens: Sequence[int], chance: random.Random) -> list[Sequence[int]]:
    found: list[Sequence[int]] = []
    at = 0
    while at < len(tokens):
        size = chance.randrange(1, 5)
        found.append(tokens[at : at + size])
        at += size
    return found


@pytest.mark.parametrize("name", DECODERS)
@given(
    parts=st.lists(
        st.sampled_from(WORDS).map(lambda w: [VOCAB[w]])
        | st.text(st.sampled_from("xé한😀 "), min_size=1, max_size=3).map(spoken),
        max_size=30,
    ),
    stops=st.lists(st.sampled_from(["stop", "st", "한한", "xé", " "]), max_size=2),
    seed=st.integers(0, 2**32),
)
def test_pieces_make_the_text_of_all_tokens_up_to_the_first_stop(
    name: str, parts: list[list[int]], stops: list[str], seed: int
):
    tokens = [token for part in parts for token in part]
    codec = Counting(name)
    growing, given_text = GrowingText(codec, stops), ""
    for piece in pieces(tokens, random.Random(seed)):
        given_text += growing.more(piece)
    whole = codec.decode(tokens)
    ends = [at for stop in stops if (at := whole.find(stop)) >= 0]
    expected = whole[: min(ends, default=len(whole))]
    assert expected.startswith(given_text)
    assert given_text + growing.more([], last=True) == expected


def test_a_long_stream_decodes_each_token_a_few_times():
    codec, count = Counting("llama"), 10_000
    growing = GrowingText(codec, ["stop" * 200])
    for i in range(count):
        growing.more([256 + i % 4])
    assert codec.decoded < 5 * count


@pytest.mark.parametrize(
    ("end", "stop", "begun"),
    [("a st", "stop", 2), ("aaa", "aab", 2), ("xaa", "aaaa", 2), ("stop", "x", 0), ("", "ab", 0)],
)
def test_the_beginning_of_a_stop_text_is_kept_back(end: str, stop: str, begun: int):
    class Text(Counting):
        def decode(self, tokens: Sequence[int]) -> str:
            return end if tokens else ""

    growing = GrowingText(Text("llama"), [stop])
    assert growing.more([1]) == end[: len(end) - begun]
    assert growing.more([], last=True) == end[len(end) - begun :]
