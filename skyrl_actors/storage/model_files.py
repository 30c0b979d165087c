"""Which safetensors files of a model's folder have its weights."""

import json
from pathlib import Path

INDEX = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model's folder.

    These are the files of its index, or model*.safetensors, or all. Mistral's folders have the same
    weights once more, as consolidated.safetensors with other names.
    """
    index = folder / INDEX
    if index.is_file():
        names: set[str] = set(json.loads(index.read_text())["weight_map"].values())
        return sorted(folder / name for name in names)
    return sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
