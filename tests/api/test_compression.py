"""Bodies of several zstd frames, and cut ones."""

import random

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from skyrl_actors.api import compression
from skyrl_actors.messages.errors import InvalidRequest

LIMIT = 10**6
PIECE = st.tuples(st.binary(max_size=300), st.integers(0, 300), st.booleans(), st.booleans())


def frame(content: bytes, with_size: bool = True, with_checksum: bool = False) -> bytes:
    maker = zstandard.ZstdCompressor(write_content_size=with_size, write_checksum=with_checksum)
    return maker.compress(content)


@given(st.lists(PIECE, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_all_frames_are_decompressed_and_cut_ones_are_refused(
    pieces: list[tuple[bytes, int, bool, bool]], chance: random.Random
):
    plain = [content * times for content, times, _, _ in pieces]
    sent = [
        frame(content, with_size, with_checksum)
        for content, (_, _, with_size, with_checksum) in zip(plain, pieces, strict=True)
    ]
    body = b"".join(sent)
    assert compression.decompress(body, LIMIT) == b"".join(plain)
    assert compression.decompressed_bytes(body, LIMIT) in (LIMIT, sum(map(len, plain)))
    ends = {sum(map(len, sent[:count])) for count in range(len(sent) + 1)}
    cut = chance.randrange(len(body))
    if cut not in ends:
        with pytest.raises(InvalidRequest, match="not valid zstd"):
            compression.decompress(body[:cut], LIMIT)
        with pytest.raises(InvalidRequest, match="not valid zstd"):
            compression.decompressed_bytes(body[:cut], LIMIT)


def test_a_frame_that_is_cut_between_blocks_is_refused():
    maker = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    first = maker.compress(b"a" * 1000) + maker.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    whole = first + maker.compress(b"b" * 1000) + maker.flush()
    assert len(compression.decompress(whole, LIMIT)) == 2000
    with pytest.raises(InvalidRequest, match="it is cut"):
        compression.decompress(first, LIMIT)


def test_frames_without_content_are_skipped_and_other_bytes_refused():
    skippable = (0x184D2A53).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"abc"
    body = skippable + frame(b"hello") + skippable
    assert compression.decompress(body, LIMIT) == b"hello"
    assert compression.decompressed_bytes(body, LIMIT) == 5
    for wrong in (frame(b"hello") + b"more", frame(b"hello") + skippable[:-1], b""):
        with pytest.raises(InvalidRequest, match="not valid zstd"):
            compression.decompress(wrong, LIMIT)


def test_the_bytes_of_all_frames_count_and_blocks_are_bounded():
    with pytest.raises(compression.BodyTooLarge, match="more than 1500 bytes"):
        compression.decompress(frame(b"x" * 1000) * 2, 1500)
    assert compression.decompress(frame(b"x" * 1000) * 2, 2000) == b"x" * 2000
    with pytest.raises(InvalidRequest, match="too many blocks"):
        compression.decompress(frame(b"") * 5000, LIMIT)
    large = frame(bytes(600 * 2**20))  # one block for 128 KiB, however small it becomes
    assert compression.decompressed_bytes(large, 2**30) == 600 * 2**20
