"""Check the weight files of a base model before a process loads them."""

import json
from pathlib import Path

from skyrl_actors.backends.memory_demands import INDEX
from skyrl_actors.messages.errors import ConfigError

POINTER = b"version https://git-lfs"  # how Git LFS begins a file in place of the content
LONGEST_POINTER = 1024  # bytes


def check_weights(folder: Path) -> None:
    """Raise ConfigError if weight files are missing or were not downloaded."""
    files = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
    if not files:
        others = " (convert *.bin with save_pretrained)" if any(folder.glob("*.bin")) else ""
        raise ConfigError(
            f"base_model.path {folder}: no weights there in *.safetensors{others}; give a folder "
            "with the whole model"
        )
    if missing := sorted(_named(folder / INDEX) - {file.name for file in files}):
        raise ConfigError(
            f"base_model.path {folder}: {len(missing)} of the weight files that {INDEX} names are "
            f"missing, first {missing[0]}; download the whole model"
        )
    for file in files:
        if file.stat().st_size <= LONGEST_POINTER and file.read_bytes().startswith(POINTER):
            raise ConfigError(
                f"base_model.path {folder}: {file.name} is a pointer of Git LFS without its "
                "content; type git lfs pull there"
            )


def _named(index: Path) -> set[str]:
    if not index.is_file():
        return set()
    try:
        return set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{index} cannot be read ({error}); download it again") from None
