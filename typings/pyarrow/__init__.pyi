"""The part of pyarrow that this project uses; the library has no annotations."""

from collections.abc import Mapping, Sequence
from typing import Any

class ArrowException(Exception): ...

class BufferReader:
    def __init__(self, obj: bytes) -> None: ...

class Table:
    def to_pylist(self) -> list[dict[str, Any]]: ...

def table(data: Mapping[str, Sequence[Any]]) -> Table: ...
