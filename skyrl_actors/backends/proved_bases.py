"""What a service knows of a base model: from its ranks and engines, or from an earlier start.

Some facts cannot be computed from a config, so they are stored when a base model has been loaded
once. A base model with the same config and libraries need not be loaded at the next start.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from skyrl_actors.backends.backend import Capabilities
from skyrl_actors.backends.site import Site, adapters_of
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.messages.image_form import form_in
from skyrl_actors.messages.model import Role
from skyrl_actors.storage.files import write_durably

FILE = "proved_bases.json"  # in the journal's folder
LIBRARIES = ("skyrl-actors", "torch", "transformers", "vllm", "jax")


@dataclass(frozen=True, slots=True)
class Facts:
    """What only a loaded base model tells."""

    vocab_size: int
    max_context_tokens: int  # of a training row
    adapts_head: bool  # engines take adapters on the output layer


def capabilities_of(
    config: ClusterConfig, base_folder: Path, site: Site, facts: Facts
) -> Capabilities:
    """Return what a service with this config serves of a base model."""
    roles: tuple[Role, ...] = ("policy", "critic") if config.critic else ("policy",)
    return Capabilities(
        base_model=config.base_model.name,
        base_folder=str(base_folder),
        vocab_size=facts.vocab_size,
        max_context_tokens=facts.max_context_tokens,
        max_sample_tokens=min(config.engine.max_model_len, facts.max_context_tokens),
        roles=roles,
        adapts_head=facts.adapts_head,
        adapters=adapters_of(config, base_folder, site),
        images=form_in(base_folder),
    )


class ProvedBases:
    """The facts of base models that were loaded with the configs and libraries of today."""

    def __init__(self, folder: Path):
        self._file = folder / FILE

    def facts(self, config: ClusterConfig, base_folder: Path) -> Facts | None:
        """Return the facts of a base model, or None if it must be loaded first."""
        stored = self._read().get(_mark(config, base_folder))
        return Facts(**stored) if stored else None

    def store(self, config: ClusterConfig, base_folder: Path, able: Capabilities) -> None:
        facts = Facts(able.vocab_size, able.max_context_tokens, able.adapts_head)
        known = self._read() | {_mark(config, base_folder): asdict(facts)}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_durably(self._file, json.dumps(known))

    def _read(self) -> dict[str, Any]:
        """Return what is stored. A file that cannot be read counts as empty."""
        try:
            return json.loads(self._file.read_bytes())
        except (OSError, ValueError):
            return {}


def _mark(config: ClusterConfig, base_folder: Path) -> str:
    """Return a digest of all that the facts may depend on."""
    sections = ("base_model", "placement", "policy", "critic", "engine", "lora", "environment")
    parts = [
        config.model_dump_json(include=set(sections)),
        str(base_folder),
        (base_folder / "config.json").read_text(),
        *(f"{name} {_version(name)}" for name in LIBRARIES),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
