"""Generate docs/reference/config.md.

Run `python -m skyrl_actors.config.config_reference > docs/reference/config.md`.
"""

import inspect
import re
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.frozen import FrozenConfig
from skyrl_actors.config.http import HttpConfig
from skyrl_actors.config.job import JobConfig
from skyrl_actors.config.load import TAG_KEYS, classes_in, tags_of
from skyrl_actors.config.sdk_flags import FLAGS
from skyrl_actors.config.transfers import SHARED_MEMORY

Section = type[FrozenConfig]
Seen = dict[tuple[Section, ...], str]
SHOWN_TAGS = 4  # more types of one class are shown by the first and the last one
HEAD = """# Configuration

This page lists every key of a service config (`skyrl-actors serve FILE`) and of a job config
(`skyrl-actors train FILE`). `python -m skyrl_actors.config.config_reference` generates it.

- Config files are YAML.
- `extends: other.yaml` loads another file first. It is allowed at the top level and under every
  key.
- `${oc.env:NAME}` inserts an environment variable.
- `key.sub=value` on the command line overrides the file.
- Unknown keys, and keys without an effect, are refused before anything starts.
- Keys that changed are listed in [Changed configuration keys](config_changes.md).
"""


def markdown() -> str:
    """Return the reference page."""
    seen: Seen = {}
    service = _sections("", [ClusterConfig], seen)
    job = _sections("", [JobConfig], seen, leave=("cluster",))
    return "\n".join(
        [
            HEAD,
            "## A service\n",
            *service,
            "## A job\n\n`cluster` contains the keys of a service.\n",
            *job,
        ]
    )


def _sections(
    path: str, options: list[Section], seen: Seen, leave: tuple[str, ...] = ()
) -> Iterator[str]:
    """Yield the keys of a section, then those of each section below it.

    A section has one class, or the classes of a union. A key that several of them have with the
    same values and the same meaning is listed once. A class that another section has too is listed
    there only.
    """
    rows: dict[tuple[str, str, str], dict[str, list[Section]]] = {}
    below: dict[str, tuple[FieldInfo, list[Section]]] = {}
    for option in options:
        for name, field in option.model_fields.items():
            if name in leave or (name in TAG_KEYS and tags_of(option)):
                continue
            if classes := classes_in(field.annotation):
                below.setdefault(name, (field, classes))
            else:
                row = (f"`{path}{name}`", _values(field), _plain(field.description or ""))
                rows.setdefault(row, {}).setdefault(_default(field), []).append(option)
    if rows and len(options) > 1:
        texts = (
            f"| {key} | {_owners(defaults, options)} | {values} | {_by_type(defaults)} | {text} |\n"
            for (key, values, text), defaults in rows.items()
        )
        yield "| key | type | values | default | meaning |"
        yield "|---|---|---|---|---|\n" + "".join(texts)
    elif rows:
        texts = (
            f"| {key} | {values} | {_by_type(defaults)} | {text} |\n"
            for (key, values, text), defaults in rows.items()
        )
        yield "| key | values | default | meaning |"
        yield "|---|---|---|---|\n" + "".join(texts)
    if HttpConfig in options:
        yield _flags(f"{path}sdk")
    for name, (field, classes) in below.items():
        yield f"### `{path}{name}`\n"
        if field.description:
            yield f"{_plain(field.description[0].upper() + field.description[1:])}.\n"
        yield from _about(classes)
        elsewhere = seen.setdefault(tuple(classes), f"{path}{name}")
        if elsewhere == f"{path}{name}":
            yield from _sections(f"{path}{name}.", classes, seen)
        elif any(set(each.model_fields) - set(TAG_KEYS) for each in classes):
            yield f"The keys are those of `{elsewhere}`.\n"


def _about(options: list[Section]) -> Iterator[str]:
    """Yield the docstrings of the classes, with their types."""
    lines: list[str] = []
    for option in options:
        text = _plain(" ".join(inspect.cleandoc(option.__dict__.get("__doc__") or "").split()))
        lines.append(f"- {_types([option])}: {text}\n" if tags_of(option) else f"{text}\n")
    yield "".join(lines)


def _types(options: list[Section]) -> str:
    """Return the types of these classes. Only the ends of a long list are shown."""
    shown: list[str] = []
    for option in options:
        tags = [f"`{tag}`" for tag in tags_of(option)]
        shown.append(", ".join(tags) if len(tags) <= SHOWN_TAGS else f"{tags[0]} … {tags[-1]}")
    return ", ".join(shown)


def _flags(key: str) -> str:
    """Return the names of the flags for SDKs, with their defaults."""
    lines = (
        f"- `{name}` ({_shown(flag.default)}): {flag.meaning}\n" for name, flag in FLAGS.items()
    )
    return f"Flags of `{key}`:\n\n" + "".join(lines)


def _owners(defaults: dict[str, list[Section]], options: list[Section]) -> str:
    """Return the types that have a key."""
    owners = [option for option in options if any(option in each for each in defaults.values())]
    return "all" if owners == options else _types(owners)


def _by_type(defaults: dict[str, list[Section]]) -> str:
    """Return the default of a key, with the types if they have different defaults."""
    if len(defaults) == 1:
        return next(iter(defaults))
    return ", ".join(f"{text or 'required'} ({_types(each)})" for text, each in defaults.items())


def _default(field: FieldInfo) -> str:
    extra: Any = field.json_schema_extra
    if isinstance(extra, dict) and "shown_default" in extra:
        return f"`{extra['shown_default']}`"
    if field.default is PydanticUndefined:
        return "by type" if field.default_factory_takes_validated_data else ""
    return "`null`" if field.default is None else _shown(field.default)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if value == SHARED_MEMORY:
        return "`/dev/shm/skyrl-actors-<user id>`"
    return "`[]`" if value in ((), []) else f"`{value}`"


def _values(field: FieldInfo) -> str:
    bounds = [str(part) for part in field.metadata if re.match(r"(Ge|Gt|Le|Lt)\(", str(part))]
    signs = {"Ge": "≥", "Gt": ">", "Le": "≤", "Lt": "<"}
    limits = [f"{signs[bound[:2]]} {bound.split('=')[1].rstrip(')')}" for bound in bounds]
    return ", ".join([_kind(field.annotation), *limits])


def _kind(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return _literals(annotation)
    if origin in (Union, UnionType):
        return " or ".join(_kind(arg) for arg in get_args(annotation) if arg is not NoneType)
    if origin is Annotated:
        return _kind(get_args(annotation)[0])
    if origin in (tuple, list):
        return f"list of {_kind(get_args(annotation)[0])}"
    if origin is dict:
        return "mapping"
    names = {
        "str": "text",
        "int": "integer",
        "float": "number",
        "bool": "true or false",
        "Path": "path",
    }
    return names.get(
        getattr(annotation, "__name__", ""), getattr(annotation, "__name__", str(annotation))
    )


def _literals(annotation: Any) -> str:
    return ", ".join(f"`{value}`" for value in get_args(annotation))


def _plain(text: str) -> str:
    """Escape characters that Markdown would read as a column or as HTML.

    Code between backticks is no HTML.
    """
    parts = text.replace("|", "\\|").split("`")
    return "`".join(
        part if number % 2 else part.replace("<", "&lt;") for number, part in enumerate(parts)
    )


if __name__ == "__main__":
    print(markdown(), end="")
