"""Load YAML files, `extends` and dotted overrides into one validated config object.

`extends: other.yaml` is allowed in every mapping. The path is relative to the file. The keys of the
mapping override those of the other file.
"""

import os
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from yaml import YAMLError

import skyrl_actors
from skyrl_actors.config import changed_keys
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.frozen import FrozenConfig
from skyrl_actors.messages.errors import ConfigError

C = TypeVar("C", bound=FrozenConfig)
QUOTE = "'"
TAG_KEYS = ("type", "place")  # the keys that choose a class of a union
SHIPPED = Path(skyrl_actors.__file__).parent / "shipped"  # the configs of the repository
KEYS_VARIABLE = "SKYRL_ACTORS_API_KEYS"  # API keys, comma-separated


def load(path: str | Path, overrides: Sequence[str] = (), schema: type[C] = ClusterConfig) -> C:
    """Read `path`, apply `key.sub=value` overrides and validate against `schema`.

    The API keys in the environment variable SKYRL_ACTORS_API_KEYS are added to http.api_keys.

    Raises:
        ConfigError: The config is not valid. The message lists every fault with its key, the given
            value and the allowed values.
    """
    source = Path(path)
    plain = raw(source, overrides)
    _check_kind(source, plain, schema)
    if schema is ClusterConfig and (keys := os.environ.get(KEYS_VARIABLE)):
        http = plain.setdefault("http", {})
        if isinstance(http, dict):
            section = cast("dict[str, Any]", http)
            section["api_keys"] = [*(section.get("api_keys") or ()), *keys.split(",")]
    try:
        return schema.model_validate(plain)
    except ValidationError as error:
        lines = [explain(fault, schema) for fault in own_faults(error)]
        raise ConfigError("\n".join([f"{source}: {len(lines)} fault(s)", *lines])) from None
    except ValueError as error:  # of a default that depends on the user
        raise ConfigError(f"{source}: {error}") from None


def own_faults(error: ValidationError) -> list[ErrorDetails]:
    """Return the faults of keys, without defaults that cannot follow from a key with a fault."""
    return [one for one in error.errors() if one["type"] != "default_factory_not_called"]


def raw(path: str | Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the keys that a file and overrides set, without defaults and not validated.

    Raises:
        ConfigError: The file cannot be read, or an override has no key.
    """
    merged = OmegaConf.create(_read(found(Path(path)), ()) if path else {})
    for text in overrides:
        if "=" not in text or text.startswith("="):
            raise ConfigError(f"override {text!r} has no key; write key.sub=value")
    try:
        merged = OmegaConf.merge(merged, OmegaConf.from_dotlist(list(overrides)))
        return cast("dict[str, Any]", OmegaConf.to_container(merged, resolve=True))
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"{path or 'overrides'}: {error}") from error


def _check_kind(source: Path, plain: dict[str, Any], schema: type[FrozenConfig]) -> None:
    """Raise ConfigError for the config of a job in place of a service's, or the reverse."""
    if "job" in schema.model_fields:
        if "job" not in plain and set(plain) & set(ClusterConfig.model_fields):
            raise ConfigError(
                f"{source} is the config of a service, and a job has the keys cluster, job and "
                f"run: type `skyrl-actors serve {source}`, or give a job's config, for example "
                "configs/jobs/grpo_tiny.yaml"
            )
    elif schema is ClusterConfig and "job" in plain:
        raise ConfigError(
            f"{source} is the config of a job: type `skyrl-actors train {source}`, or give a "
            "service's config, for example configs/cpu_tiny.yaml"
        )


def found(path: Path, folder: Path = Path()) -> Path:
    """Return the path in a folder. `configs/…` that is not there is a shipped config.

    So `configs/cpu_tiny.yaml` is found everywhere, also by a package without its repository.
    """
    there = folder / path
    if there.exists() or path.parts[:1] != ("configs",):
        return there
    shipped = SHIPPED.joinpath(*path.parts[1:])
    return shipped if shipped.is_file() else there


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
    below = _read(found(Path(str(node["extends"])), path.parent), seen)
    return cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.merge(below, own)))


def explain(detail: ErrorDetails, schema: type[FrozenConfig]) -> str:
    """Return one fault with its key, the given value and what is allowed."""
    key = ".".join(_position(schema, detail["loc"])[0]) or "(whole config)"
    message = detail["msg"].removeprefix("Value error, ")
    context = detail.get("ctx", {})
    if detail["type"] == "extra_forbidden":
        path, owners = _position(schema, detail["loc"][:-1])
        allowed = sorted({name for owner in owners for name in owner.model_fields})
        meant = _meant(str(detail["loc"][-1]), allowed, path) or _below(
            str(detail["loc"][-1]), owners, path
        )
        parts = [f"did you mean {meant}?" if meant else "", f"allowed here: {', '.join(allowed)}"]
        message = "unknown key; " + " ".join(part for part in parts if part)
        message = message if allowed else "unknown key"
        message = changed_keys.advice((*path, str(detail["loc"][-1]))) or message
    elif detail["type"] == "union_tag_not_found":
        _, options = _position(schema, detail["loc"])
        known = ", ".join(str(tag) for option in options for tag in tags_of(option))
        tag = str(context.get("discriminator", "type")).strip("'")
        message = f"set {tag} to one of {known}"
    elif detail["type"] == "union_tag_invalid":
        key = f"{key}.{str(context['discriminator']).strip(QUOTE)}"
        message = _choice(context["tag"], str(context["expected_tags"]))
    elif "api_keys" in detail["loc"]:
        pass  # the given value is a secret
    elif detail["type"] == "literal_error":
        message = _choice(detail["input"], str(context["expected"]))
    elif detail["type"] not in ("value_error", "missing"):
        message = f"{message} (got {detail['input']!r})"
    return f"  {key}: {message}"


def _choice(given: object, allowed: str) -> str:
    """Explain a value that is none of the allowed ones, which pydantic lists with quotes."""
    known = re.findall(f"{QUOTE}([^{QUOTE}]+){QUOTE}", allowed)
    begun = [name for name in known if len(str(given)) > 1 and name.startswith(str(given))]
    close = begun or get_close_matches(str(given), known, n=2)
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{given!r} is not known; {meant}allowed: {allowed.replace(QUOTE, '')}"


def _meant(key: str, allowed: Sequence[str], path: Sequence[str]) -> str:
    """Return the key that was probably meant by an unknown one below `path`, or an empty text."""
    short_for = [name for name in allowed if _initials(name) == key]
    if close := short_for or get_close_matches(key, allowed, n=1):
        return ".".join((*path, close[0]))
    return f"cluster.{key}" if "cluster" in allowed and key in ClusterConfig.model_fields else ""


def _initials(key: str) -> str:
    """Return lr for learning_rate; an empty text for a key of one word."""
    words = key.split("_")
    return "".join(word[0] for word in words if word) if len(words) > 1 else ""


def _below(key: str, owners: Sequence[type[FrozenConfig]], path: tuple[str, ...]) -> str:
    """Return the one key of this name in a section below `path`; an empty text without one."""
    found = {
        ".".join((*path, name, key))
        for owner in owners
        for name, field in owner.model_fields.items()
        for section in classes_in(field.annotation)
        if key in section.model_fields
    }
    return found.pop() if len(found) == 1 else ""


def _position(
    schema: type[FrozenConfig], loc: tuple[int | str, ...]
) -> tuple[tuple[str, ...], list[type[FrozenConfig]]]:
    """Return the key of a location, and the config classes that are allowed there.

    Pydantic inserts the tag of a union's chosen member and the index of a list's item into `loc`.
    """
    nodes, path = [schema], ()
    tag_may_follow = False
    for part in loc:
        if isinstance(part, int):
            path = (*path, str(part))
            continue
        if tag_may_follow and (chosen := [node for node in nodes if part in tags_of(node)]):
            nodes, tag_may_follow = chosen, False
            continue
        found = [node.model_fields[part] for node in nodes if part in node.model_fields]
        nodes = [option for field in found for option in classes_in(field.annotation)]
        path, tag_may_follow = (*path, part), True
    return path, nodes


def classes_in(annotation: Any) -> list[type[FrozenConfig]]:
    """Return the config classes of a key's annotation: one, the members of a union, or none."""
    if isinstance(annotation, type) and issubclass(annotation, FrozenConfig):
        return [annotation]
    return [c for arg in get_args(annotation) for c in classes_in(arg)]


def tags_of(schema: type[FrozenConfig]) -> tuple[str, ...]:
    """Return the values by which the config chooses this class among those of its union."""
    fields = schema.model_fields
    return next((get_args(fields[tag].annotation) for tag in TAG_KEYS if tag in fields), ())


def to_yaml(config: FrozenConfig) -> str:
    """Return the resolved config as YAML. `load` reads it back to a config of the same effect."""
    plain = config.model_dump(mode="json")
    for service in (plain, plain.get("cluster", {})):
        # Earlier versions have one base model only, so their configs stay comparable.
        unused = ["base_model"] if service.get("base_models") else ["base_models", "parking"]
        # And one controller.
        unused += [] if service.get("shards", {}).get("count", 1) > 1 else ["shards"]
        for key in unused:
            service.pop(key, None)
    return OmegaConf.to_yaml(OmegaConf.create(plain))


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
    return set(_read(found(Path(path)), ()))
