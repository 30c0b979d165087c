"""Full weights in parts: those of the base model, and how vLLM is told of one part."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

from skyrl_actors.engines.interface import BASE_VERSION, EngineSpec
from skyrl_actors.messages.errors import NotFound
from skyrl_actors.messages.weights import WeightManifest, WeightStream
from skyrl_actors.transfer.folders import full_manifests


def base_parts(spec: EngineSpec) -> tuple[WeightManifest, ...]:
    """Return the parts of the base model's weights, none for file formats other than ours."""
    with suppress(NotFound):  # vLLM itself reports what does not match
        return full_manifests(Path(spec.base_folder), BASE_VERSION)
    return ()


def has_tower(parts: Iterable[WeightManifest]) -> bool:
    """Return whether a vision tower's weights are among these."""
    return any("visual" in entry.name.split(".") for part in parts for entry in part.tensors)


def missing_files(
    parts: Sequence[WeightManifest], streams: Sequence[WeightStream | None]
) -> list[str]:
    """Return the paths that cannot be read, of parts that come from no stream."""
    mapped = [part.path for part, stream in zip(parts, streams, strict=True) if stream is None]
    return [path for path in mapped if not Path(path).is_file()]


def update_info(part: WeightManifest, stream: WeightStream | None) -> dict[str, Any]:
    """Return the fields of `FullWeightsUpdate` for one part."""
    return {
        "path": part.path,
        "num_bytes": part.num_bytes,
        "tensors": [list(astuple(t)) for t in part.tensors],
        "stream": list(astuple(stream)) if stream else None,
    }
