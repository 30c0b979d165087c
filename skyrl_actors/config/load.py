"""Load YAML files, `extends` and dotted overrides into one validated config object.

`extends: other.yaml` is allowed in every mapping. The path is relative to the file. The keys of the
mapping override those of the other file.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from yaml import YAMLError

from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.frozen import FrozenConfig
from skyrl_actors.messages.errors import ConfigError

C = TypeVar("C", bound=FrozenConfig)
KEYS_VARIABLE = "SKYRL_ACTORS_API_KEYS"  # API keys, comma-separated


def load(path: str | Path, overrides: Sequence[str] = (), schema: type[C] = ClusterConfig) -> C:
    """Read `path`, apply `key.sub=value` overrides and validate against `schema`.

    The API keys in the environment variable SKYRL_ACTORS_API_KEYS are added to http.api_keys.

    Raises:
        ConfigError: The config is not valid. The message lists every fault with its key, the given
            value and the allowed values.
    """
    source = Path(path)
    merged = OmegaConf.create(_read(source, ()))
    for text in overrides:
        if "=" not in text or text.startswith("="):
            raise ConfigError(f"override {text!r} has no key; write key.sub=value")
    try:
        merged = OmegaConf.merge(merged, OmegaConf.from_dotlist(list(overrides)))
        if schema is ClusterConfig and (keys := os.environ.get(KEYS_VARIABLE)):
            given: list[str] = list(OmegaConf.select(merged, "http.api_keys") or ())
            merged = OmegaConf.merge(merged, {"http": {"api_keys": [*given, *keys.split(",")]}})
        plain = OmegaConf.to_container(merged, resolve=True)
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"{source}: {error}") from error
    try:
        return schema.model_validate(plain)
    except ValidationError as error:
        lines = [_explain(detail, schema) for detail in error.errors()]
        raise ConfigError("\n".join([f"{source}: {len(lines)} fault(s)", *lines])) from None


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    path = path.resolve()
    if path in seen:
        raise ConfigError(
            f"{path}: extends itself through {' -> '.join(str(p.name) for p in seen)}"
        )
    try:
        content = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (YAMLError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(content, DictConfig):
        raise ConfigError(
            f"{path}: the top level of a config file must be a mapping of keys to values"
        )
    plain = cast("dict[str, Any]", OmegaConf.to_container(content, resolve=False))
    return _extended(plain, path, (*seen, path))


def _extended(node: dict[str, Any], path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    own: dict[str, Any] = {}
    for key, value in node.items():
        if key != "extends":
            own[key] = (
                _extended(cast("dict[str, Any]", value), path, seen)
                if isinstance(value, dict)
                else value
            )
    if "extends" not in node:
        return own
    below = _read(path.parent / str(node["extends"]), seen)
    return cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.merge(below, own)))


RENAMED = {
    (
        "transfer",
        "freeze",
    ): "transfer.materialize=eager for always, transfer.materialize=lazy for when_needed",
}
"""The first and the last name of a key that has another name now, and what to write instead."""


def _explain(detail: ErrorDetails, schema: type[FrozenConfig]) -> str:
    key = ".".join(str(part) for part in detail["loc"]) or "(whole config)"
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        allowed = _fields_at(schema, detail["loc"][:-1])
        message = "unknown key" + (f"; allowed here: {', '.join(allowed)}" if allowed else "")
        if (new := RENAMED.get((str(detail["loc"][0]), str(detail["loc"][-1])))) is not None:
            message = f"this key was renamed; use {new}"
    elif "api_keys" in detail["loc"]:
        pass  # the given value is a secret
    elif detail["type"] not in ("value_error", "missing"):
        message = f"{message} (got {detail['input']!r})"
    return f"  {key}: {message}"


def _fields_at(schema: type[FrozenConfig], loc: tuple[int | str, ...]) -> list[str]:
    """Return the names that are allowed at a key.

    Pydantic inserts the tag of a union's chosen member into `loc`.
    """
    nodes = [schema]
    for part in loc:
        chosen = [node for node in nodes if part in _tags(node)]
        nodes = chosen or [
            option
            for node in nodes
            if isinstance(part, str) and part in node.model_fields
            for option in classes_in(node.model_fields[part].annotation)
        ]
    return sorted({name for node in nodes for name in node.model_fields})


def classes_in(annotation: Any) -> list[type[FrozenConfig]]:
    """Return the config classes of a key's annotation: one, the members of a union, or none."""
    if isinstance(annotation, type) and issubclass(annotation, FrozenConfig):
        return [annotation]
    return [c for arg in get_args(annotation) for c in classes_in(arg)]


def _tags(schema: type[FrozenConfig]) -> tuple[Any, ...]:
    return get_args(schema.model_fields["type"].annotation) if "type" in schema.model_fields else ()


def to_yaml(config: FrozenConfig) -> str:
    """Return the resolved config as YAML. `load` reads it back to an equal object."""
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))


def differing(before: str, now: str, leave: Sequence[str] = ()) -> list[str]:
    """Return the dotted keys with different values in two YAML configs, with both values.

    The keys in `leave`, and all keys below them, are not compared.
    """
    found: list[str] = []

    def compare(a: Any, b: Any, key: str) -> None:
        if key in leave:
            return
        if isinstance(a, dict) and isinstance(b, dict):
            one, other = cast("dict[str, Any]", a), cast("dict[str, Any]", b)
            for part in sorted({*one, *other}):
                compare(one.get(part), other.get(part), f"{key}.{part}" if key else part)
        elif a != b:
            found.append(f"{key} ({a!r}, now {b!r})")

    compare(
        OmegaConf.to_container(OmegaConf.create(before)),
        OmegaConf.to_container(OmegaConf.create(now)),
        "",
    )
    return found


def top_level_keys(path: str | Path) -> set[str]:
    """Return the top-level keys of a file without validation.

    They tell service configs from job configs.
    """
    return set(_read(Path(path), ()))
