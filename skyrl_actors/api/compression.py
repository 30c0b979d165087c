"""Decompress bodies, up to a limit."""

import zstandard

from skyrl_actors.messages.errors import InvalidRequest


class BodyTooLarge(InvalidRequest):
    """A body, or its decoded content, exceeds a limit."""

    status = 413


def decompressed_bytes(body: bytes, limit: int) -> int:
    """Return how many bytes `decompress` makes of a body: `limit` if the body does not say."""
    try:
        size = zstandard.frame_content_size(body)
    except zstandard.ZstdError:
        return 0  # it will be refused
    return limit if size < 0 else min(size, limit)


def decompress(body: bytes, limit: int) -> bytes:
    """Decompress zstd. Raises BodyTooLarge beyond `limit` bytes, or InvalidRequest."""
    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as reader:
            plain = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise InvalidRequest(f"the body is not valid zstd: {error}") from None
    if len(plain) > limit:
        raise BodyTooLarge(
            f"the decompressed body has more than {limit} bytes; at most {limit} are allowed"
        )
    return plain
