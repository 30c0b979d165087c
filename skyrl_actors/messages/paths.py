"""Parse ids and tinker paths in one place, because they become parts of file paths.

A checkpoint is tinker://<model id>/<weights|sampler_weights|external_weights>/<name>. The model
after its n-th optim_step is tinker://<model id>/steps/<n>. A model id is <session>:train:<n>, a
sampler id is <session>:sample:<n>. Ids of sessions and requests that belong to shard 2 of a service
begin with s2- and r2-.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from skyrl_actors.messages.errors import InvalidRequest

Kind = Literal["weights", "sampler_weights", "external_weights", "steps"]
CHECKPOINT_KINDS: tuple[Kind, ...] = ("weights", "sampler_weights", "external_weights")
KINDS: dict[str, Kind] = {kind: kind for kind in (*CHECKPOINT_KINDS, "steps")}
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
CACHED_CHARS = 128  # of ids whose owner is kept
_MARK = re.compile(r"[0-9a-f]k([0-9a-f]{10})$")
_SHARD = re.compile(r"(?:s|r|direct)([1-9][0-9]{0,2})-")
_PATH = re.compile(r"tinker://([^/]+)/(weights|sampler_weights|external_weights|steps)/([^/]+)")


@dataclass(frozen=True, slots=True)
class TinkerPath:
    """The parts of a tinker path."""

    model_id: str
    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"


def is_id(text: str) -> bool:
    """Return whether a text can be an id, and so a part of a file's path."""
    return bool(_ID.fullmatch(text))


def checked_id(text: str, what: str) -> str:
    """Return the id. Raises InvalidRequest when it has other characters or is too long."""
    if not is_id(text):
        raise InvalidRequest(
            f"{what} {text[:80]!r}: use up to 128 of A-Z a-z 0-9 . _ : - "
            "and begin with a letter or digit"
        )
    return text


def checked_name(text: str) -> str:
    """Return the name. Raises InvalidRequest when it has other characters or is too long."""
    if not _NAME.fullmatch(text):
        raise InvalidRequest(
            f"checkpoint name {text[:80]!r}: use up to 128 of A-Z a-z 0-9 . _ - "
            "and begin with a letter, digit or _"
        )
    return text


def parse_path(text: str) -> TinkerPath:
    """Parse a path. Raises InvalidRequest for any text that is not a complete tinker path."""
    match = _PATH.fullmatch(text)
    if not match:
        raise InvalidRequest(
            f"{text[:200]!r} is not a tinker path: use tinker://<model id>/weights/<name> "
            "or tinker://<model id>/sampler_weights/<name>"
        )
    model_id, kind, name = match.groups()
    if kind == "steps" and not (name.isascii() and name.isdecimal() and len(name) <= 9):
        raise InvalidRequest(
            f"{text[:200]!r}: a past step must be a number, tinker://<model id>/steps/<n>"
        )
    return TinkerPath(checked_id(model_id, "model id"), KINDS[kind], checked_name(name))


def owner_mark(owner: str) -> str:
    """Return the suffix of session and request ids that are created for an API key."""
    return f"k{owner}"


def owner_of(text: str) -> str:
    """Return the owner in a session, model, sampler, run or request id, or "" without a key."""
    return _cached_owner(text) if len(text) <= CACHED_CHARS else _owner(text)


def _owner(text: str) -> str:
    match = _MARK.search(text.partition(":")[0])
    return match.group(1) if match else ""


_cached_owner = lru_cache(4096)(_owner)  # the controller asks ten times for each request


def shard_mark(number: int) -> str:
    """Return what follows the first letters of an id of this shard. The first one has none."""
    return "" if number == 1 else f"{number}-"


def shard_of(text: str) -> int:
    """Return the shard in a session, model, sampler, run or request id; 1 without a mark."""
    match = _SHARD.match(text)
    return int(match.group(1)) if match else 1


def model_id_for(session_id: str, seq: int) -> str:
    """Return the id of the model with this number in a session."""
    return f"{session_id}:train:{seq}"


def sampler_id_for(session_id: str, seq: int) -> str:
    """Return the id of the sampler with this number in a session."""
    return f"{session_id}:sample:{seq}"


def refuse_export(path: TinkerPath) -> None:
    """Raise InvalidRequest for a checkpoint that was exported for other tools."""
    if path.kind == "external_weights":
        raise InvalidRequest(
            f"{path} was written for other tools; load from tinker://{path.model_id}/weights/<name>"
        )
