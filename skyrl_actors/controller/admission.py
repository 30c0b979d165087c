"""Checks that several kinds of requests share, made before a request is queued (pure).

Each check raises InvalidRequest or CapacityError with the value, what is allowed and what to do.
"""

from collections.abc import Iterable, Mapping, Sequence

from skyrl_actors.messages.errors import CapacityError, InvalidRequest
from skyrl_actors.messages.paths import owner_of

METADATA_BYTES = 16 * 2**10  # limit for a session, model or checkpoint
LARGEST_INT = 2**62  # limit for numbers that only identify something


def check_seq_id(seq_id: int | None) -> None:
    """Check that a sequence number is in range. None is allowed."""
    if seq_id is not None and not 0 <= seq_id <= LARGEST_INT:
        raise InvalidRequest(f"seq_id {seq_id}: use 0 to 2^62")


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Check that all keys and values together have at most `METADATA_BYTES` bytes."""
    num_bytes = sum(
        len(text.encode(errors="surrogatepass")) for pair in metadata.items() for text in pair
    )
    if num_bytes > METADATA_BYTES:
        raise InvalidRequest(
            f"user_metadata has {num_bytes} bytes of keys and values; "
            f"at most {METADATA_BYTES} are taken"
        )


def check_tags(tags: Sequence[str]) -> None:
    """Check that all tags together have at most `METADATA_BYTES` bytes."""
    num_bytes = sum(len(tag.encode(errors="surrogatepass")) for tag in tags)
    if num_bytes > METADATA_BYTES:
        raise InvalidRequest(f"tags have {num_bytes} bytes; at most {METADATA_BYTES} are taken")


def check_count(ids: Iterable[str], new_id: str, limit: int, what: str) -> None:
    """Raise CapacityError when the new id's API key has `limit` ids already."""
    owner = owner_of(new_id)
    if sum(owner_of(known) == owner for known in ids) >= limit:
        raise CapacityError(
            f"{limit} {what} of this API key are alive, the maximum for one key; "
            "finish a session first"
        )
