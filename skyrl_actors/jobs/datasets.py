"""Rows of a dataset: JSONL, Parquet, a Hugging Face dataset. What can not be used is refused by file, row and column."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from skyrl_actors import storage
from skyrl_actors.config.environments import DatasetConfig
from skyrl_actors.messages.errors import ConfigError

Row = Mapping[str, Any]
T = TypeVar("T")


def read(config: DatasetConfig, needed: Sequence[str]) -> list[Row]:
    """All rows, up to `limit`. Raises ConfigError when they can not be read, are none, or lack a needed column or its value."""
    if config.path.endswith(".jsonl"):
        rows = _jsonl(config.path)
    elif config.path.endswith(".parquet"):
        rows = _parquet(config.path)
    else:
        rows = _hugging_face(config)
    rows = rows[: config.limit]
    if not rows:
        raise ConfigError(f"dataset {config.path}: it has no rows")
    for number, row in enumerate(rows, 1):
        for column in needed:
            if column not in row:
                raise ConfigError(
                    f"dataset {config.path}, row {number}: no column {column!r}; it has {', '.join(sorted(row)) or 'none'}"
                )
            if row[column] in (None, "", []) or (isinstance(row[column], str) and not row[column].strip()):
                raise ConfigError(f"dataset {config.path}, row {number}: column {column!r} is empty")
    return rows


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring rows of a dataset; the first is number `first` of it."""

    rows: list[Row]
    source: str
    first: int = 1

    def numbered(self) -> Iterator[tuple[int, Row]]:
        return enumerate(self.rows, self.first)


def split_off(rows: list[Row], config: DatasetConfig | None, needed: Sequence[str], count: int, source: str) -> tuple[Part, Part]:
    """Rows to train on and rows to evaluate on: all of `config`, else the last `count` of `rows`."""
    if config is not None:
        return Part(rows, source), Part(read(config, needed), config.path)
    if len(rows) <= count:
        raise ConfigError(
            f"dataset {source} has {len(rows)} rows and {count} of them are kept for evaluation, which leaves none to train on; "
            "give eval_data, or keep fewer"
        )
    return Part(rows[:-count], source), Part(rows[-count:], source, len(rows) - count + 1)


def in_row(number: int, make: Callable[[], T], source: str) -> T:
    """What is made of a row; a ConfigError says which row it was."""
    try:
        return make()
    except ConfigError as error:
        raise ConfigError(f"dataset {source}, row {number}: {error}") from None


def _jsonl(path: str) -> list[Row]:
    rows: list[Row] = []
    try:
        for number, line in enumerate(_content(path).splitlines(), 1):
            if not line.strip():
                continue
            where = f"dataset {path}, line {number}"
            try:
                row = json.loads(line.decode())
            except UnicodeDecodeError as error:
                raise ConfigError(f"{where}: not UTF-8 at byte {error.start} of the line; convert the file") from None
            except json.JSONDecodeError as error:
                raise ConfigError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
            if not isinstance(row, dict):
                raise ConfigError(f"{where}: a {type(row).__name__}; every line is one JSON object")
            rows.append(row)
    except OSError as error:
        raise ConfigError(f"dataset {path}: {error.strerror or error}") from None
    return rows


def _content(path: str) -> bytes:
    return storage.read(path) if storage.is_url(path) else Path(path).expanduser().read_bytes()


def _parquet(path: str) -> list[Row]:
    from pyarrow import (
        ArrowException,  # half a second, that other commands need not wait for
        BufferReader,
        parquet,
    )

    try:
        return parquet.read_table(BufferReader(_content(path))).to_pylist()
    except (ArrowException, OSError) as error:
        raise ConfigError(f"dataset {path}: can not be read as Parquet: {error}") from None


def _hugging_face(config: DatasetConfig) -> list[Row]:
    import datasets
    from datasets.exceptions import DatasetsError

    datasets.disable_progress_bars()
    folder = Path(config.path).expanduser()
    try:
        if (folder / "dataset_info.json").exists() or (folder / "dataset_dict.json").exists():
            loaded: Any = datasets.load_from_disk(str(folder))
            found: Any = loaded[config.split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            found = datasets.load_dataset(config.path, split=config.split)
    except (OSError, ValueError, KeyError, DatasetsError) as error:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise ConfigError(f"dataset {config.path}, split {config.split}: {error}{offline}") from None
    return [dict(row) for row in found]
