"""Decompress bodies, up to a limit."""

from collections.abc import Iterator

import zstandard

from skyrl_actors.messages.errors import InvalidRequest

MOST_BLOCKS = 4096  # of one body, and one more for each BLOCK_BYTES that a body may have
BLOCK_BYTES = 2**14  # an eighth of what compressors put into a block
SKIPPABLE, SKIPPABLE_MASK = 0x184D2A50, 0xFFFFFFF0  # frames without content (RFC 8878, 3.1.2)
RLE = 1  # a block of one byte that is repeated


class BodyTooLarge(InvalidRequest):
    """A body, or its decoded content, exceeds a limit."""

    status = 413


def decompressed_bytes(body: bytes, limit: int) -> int:
    """Return how many bytes `decompress` makes of a body: `limit` if the body does not say.

    Raises InvalidRequest if the body is cut.
    """
    sizes = [zstandard.frame_content_size(frame) for frame in frames(body, limit)]
    return limit if min(sizes, default=0) < 0 else min(sum(sizes), limit)


def decompress(body: bytes, limit: int) -> bytes:
    """Decompress all frames of zstd.

    Raises BodyTooLarge beyond `limit` bytes, or InvalidRequest.
    """
    parts, size = list[bytes](), 0
    try:
        for frame in frames(body, limit):
            with zstandard.ZstdDecompressor().stream_reader(frame) as reader:
                parts.append(reader.read(limit - size + 1))
            size += len(parts[-1])
            if size > limit:
                break
    except zstandard.ZstdError as error:
        raise InvalidRequest(f"the body is not valid zstd: {error}") from None
    if size > limit:
        raise BodyTooLarge(
            f"the decompressed body has more than {limit} bytes; at most {limit} are allowed"
        )
    return parts[0] if len(parts) == 1 else b"".join(parts)


def frames(body: bytes, limit: int) -> Iterator[bytes]:
    """Yield the frames of a zstd body that have content. It may have `limit` bytes decompressed.

    The decoder reads one frame, and takes the end of its input for the end of the frame. So a cut
    body, and data after the first frame, would be lost without a word.
    """
    start, left = 0, MOST_BLOCKS + max(len(body), limit) // BLOCK_BYTES
    while start < len(body) or not start:
        if int.from_bytes(body[start : start + 4], "little") & SKIPPABLE_MASK == SKIPPABLE:
            start += 8 + int.from_bytes(body[start + 4 : start + 8], "little")
            left -= 1
        else:
            end, left = _end_of_frame(body, start, left)
            if end <= len(body):
                yield body if not start and end == len(body) else body[start:end]
            start = end
        if left < 0:
            raise InvalidRequest("the body has too many blocks; compress it in larger pieces")
        if start > len(body):
            raise InvalidRequest("the body is not valid zstd: it is cut")


def _end_of_frame(body: bytes, start: int, left: int) -> tuple[int, int]:
    """Return where the frame ends, and how many blocks are left of `left`."""
    try:
        head = body[start : start + 18]  # of the longest header
        at = start + zstandard.frame_header_size(head)
        has_checksum = zstandard.get_frame_parameters(head).has_checksum
    except zstandard.ZstdError as error:
        raise InvalidRequest(f"the body is not valid zstd: {error}") from None
    is_last = False
    while not is_last and at + 3 <= len(body) and left >= 0:
        block = int.from_bytes(body[at : at + 3], "little")
        is_last, kind, size = bool(block & 1), block >> 1 & 3, block >> 3
        at += 3 + (1 if kind == RLE else size)
        left -= 1
    if not is_last:
        return len(body) + 1, left
    return at + 4 * has_checksum, left
