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
from skyrl_actors.config.job import JobConfig
from skyrl_actors.config.load import classes_in
from skyrl_actors.config.transfers import SHARED_MEMORY

Seen = dict[type[FrozenConfig], str]
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
    service, job = (
        _sections("", ClusterConfig, {}),
        _sections("", JobConfig, {}, leave=("cluster",)),
    )
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
    path: str, schema: type[FrozenConfig], seen: Seen, leave: tuple[str, ...] = ()
) -> Iterator[str]:
    """Yield the keys of this class, then those of each class below it.

    Each class is listed once.
    """
    fields = {name: field for name, field in schema.model_fields.items() if name not in leave}
    below = [
        (f"{path}{name}", field, option)
        for name, field in fields.items()
        for option in classes_in(field.annotation)
    ]
    rows = [
        _row(f"{path}{name}", field)
        for name, field in fields.items()
        if not classes_in(field.annotation) and name != "type"
    ]
    if rows:
        yield "| key | values | default | meaning |\n|---|---|---|---|\n" + "".join(rows)
    for key, field, option in below:
        tag = option.model_fields.get("type")
        chosen = f", type {_literals(tag.annotation)}" if tag else ""
        about = " ".join(inspect.cleandoc(option.__dict__.get("__doc__") or "").split())
        purpose = field.description or ""
        texts = (purpose and f"{purpose[0].upper()}{purpose[1:]}.", about)
        yield f"### `{key}`{chosen}\n" + "".join(f"\n{_plain(text)}\n" for text in texts if text)
        if option in seen:
            if set(option.model_fields) - {"type"}:
                yield f"The keys are those of `{seen[option]}`.\n"
            continue
        seen[option] = key
        yield from _sections(f"{key}.", option, seen)


def _row(key: str, field: FieldInfo) -> str:
    default = (
        ""
        if field.default is PydanticUndefined
        else "`null`"
        if field.default is None
        else _shown(field.default)
    )
    return f"| `{key}` | {_values(field)} | {default} | {_plain(field.description or '')} |\n"


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
