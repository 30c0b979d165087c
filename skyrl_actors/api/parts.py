"""Limit the number of parts of a body before it is decoded (pure).

An empty protobuf message has two bytes and takes about a hundred in memory. An empty JSON list has
three bytes and takes 56. So a body of 4 MiB may decode to 600 MiB. The number of parts bounds the
memory for decoding.
"""

from skyrl_actors.messages.columns import MAX_DATUMS
from skyrl_actors.messages.errors import InvalidRequest

PARTS_PER_DATUM = 512  # SDKs send each message of a conversation as a few chunks
PARTS = 4096  # in addition to those of datums
MOST_PARTS = PARTS + PARTS_PER_DATUM * MAX_DATUMS
UNCHECKED_BYTES = 2**16  # smaller bodies cannot decode to much
NUMBER_BYTES = 4  # of a tensor's element; a body's limit counts the bytes of its tensors
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MALFORMED = (
    "the body is not a ForwardBackwardRequest: "
    "it ends within a field, or has a field of an unknown kind"
)
# Fields that hold messages, by field number, from a ForwardBackwardRequest down.
Nested = dict[int, "Nested"]
LEAF: Nested = {}
TENSOR: Nested = {2: LEAF}
CHUNK: Nested = {1: LEAF, 2: LEAF, 3: LEAF}
DATUM: Nested = {1: CHUNK, 2: {2: TENSOR}}
BATCH: Nested = {3: DATUM, 5: LEAF, 7: {2: LEAF}}
SHAPE = 4  # a tensor's packed numbers, each of which counts as a part


def check_json_size(body: bytes, limit_bytes: int) -> None:
    """Check that JSON has no more parts than a body of MAX_DATUMS datums needs.

    Parts are lists, objects and numbers. Raises InvalidRequest.
    """
    if len(body) <= UNCHECKED_BYTES:
        return
    found = body.count(b"{") + body.count(b"[")
    if found > MOST_PARTS:
        raise InvalidRequest(
            f"the body has {found} lists and objects; at most {MOST_PARTS} are allowed"
        )
    values, most_values = body.count(b","), limit_bytes // NUMBER_BYTES + MOST_PARTS
    if values > most_values:
        raise InvalidRequest(f"the body has {values} values; at most {most_values} are allowed")


def check_proto_size(body: bytes) -> None:
    """Check that protobuf has no more parts than MAX_DATUMS datums need. Raises InvalidRequest."""
    if len(body) <= UNCHECKED_BYTES:
        return
    if _count(memoryview(body), BATCH, MOST_PARTS) < 0:
        raise InvalidRequest(
            f"the body has more than {MOST_PARTS} fields; at most {MOST_PARTS} are allowed"
        )


def _count(content: memoryview, nested: Nested, left: int) -> int:
    """Subtract the number of fields from `left`. Return a negative number when it is exceeded."""
    at, end = 0, len(content)
    while at < end:
        left -= 1
        if left < 0:
            return left
        tag, at = _varint(content, at)
        number, kind = tag >> 3, tag & 7
        if kind == BYTES:
            size, at = _varint(content, at)
            if at + size > end:
                raise InvalidRequest(MALFORMED)
            if number in nested:
                left = _count(content[at : at + size], nested[number], left)
            elif nested is TENSOR and number == SHAPE:
                left -= size
            at += size
        elif kind == VARINT:
            _, at = _varint(content, at)
        elif kind in (FIXED32, FIXED64):
            at += 4 if kind == FIXED32 else 8
        else:
            raise InvalidRequest(MALFORMED)
        if left < 0:
            return left
    if at > end:
        raise InvalidRequest(MALFORMED)
    return left


def _varint(content: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(content) and shift < 64:
        byte = content[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
    raise InvalidRequest(MALFORMED)
