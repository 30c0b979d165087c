"""Full weights in parts: those of the base model, and how vLLM is told of one part."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from skyrl_actors.engines.interface import BASE_VERSION, EngineSpec
from skyrl_actors.messages.errors import NotFound
from skyrl_actors.messages.weights import TensorEntry, WeightManifest, WeightStream
from skyrl_actors.transfer.folders import full_manifests


def base_parts(spec: EngineSpec) -> tuple[WeightManifest, ...]:
    """Return the parts of the base model's weights, none for file formats other than ours."""
    with suppress(NotFound):  # vLLM itself reports what does not match
        return full_manifests(Path(spec.base_folder), BASE_VERSION)
    return ()


Streams = Sequence[WeightStream | None]


class TowerOfEngine:
    """Whose vision tower an engine holds.

    Weights of models that do not train the tower come without one, and need the base's.
    """

    def __init__(self, spec: EngineSpec):
        self._spec, self._is_base = spec, True

    def completed(
        self, parts: Sequence[WeightManifest], streams: Streams
    ) -> tuple[tuple[WeightManifest, ...], tuple[WeightStream | None, ...]]:
        """Return the parts to load, with the base's tower first if they have none.

        vLLM takes each tensor once in an update, and needs all.
        """
        given = tuple(streams) or (None,) * len(parts)
        before = () if has_tower(parts) else self._of_base
        return (*before, *parts), ((None,) * len(before) + given)

    @cached_property
    def _of_base(self) -> tuple[WeightManifest, ...]:
        """The base's tower; nothing for a model without one."""
        parts = base_parts(self._spec)
        towers = [replace(part, tensors=tuple(filter(_of_tower, part.tensors))) for part in parts]
        return tuple(part for part in towers if part.tensors)

    def changed(self, version: str, parts: Sequence[WeightManifest]) -> bool:
        """Note the given parts of a version that was loaded; return whether the tower is new."""
        before, self._is_base = self._is_base, version == BASE_VERSION or not has_tower(parts)
        return not (before and self._is_base)


def has_tower(parts: Iterable[WeightManifest]) -> bool:
    """Return whether a vision tower's weights are among these."""
    return any(_of_tower(entry) for part in parts for entry in part.tensors)


def _of_tower(entry: TensorEntry) -> bool:
    return "visual" in entry.name.split(".")


def missing_files(parts: Sequence[WeightManifest], streams: Streams) -> list[str]:
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
