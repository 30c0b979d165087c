"""docs/config.md, from the config classes: python -m skyrl_actors.config.table > docs/config.md"""

import inspect
import re
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from skyrl_actors.config.base import FrozenConfig
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.job import JobConfig
from skyrl_actors.config.load import classes_in
from skyrl_actors.config.transfers import SHARED_MEMORY

Seen = dict[type[FrozenConfig], str]
HEAD = """# Configuration

Every key of a service's config (`skyrl-actors serve FILE`) and of a job's (`skyrl-actors train FILE`), as `python -m
skyrl_actors.config.table` prints them. Files are YAML; `extends: other.yaml` reads another one first, at the top or under any key; `${oc.env:NAME}` reads the
environment; `key.sub=value` on the command line stands over the file. An unknown key, or one that would have no effect, is refused before
anything starts.
"""


def markdown() -> str:
    service, job = _sections("", ClusterConfig, {}), _sections("", JobConfig, {}, leave=("cluster",))
    return "\n".join([HEAD, "## A service\n", *service, "## A job\n\n`cluster` holds the keys of a service, above.\n", *job])


def _sections(path: str, schema: type[FrozenConfig], seen: Seen, leave: tuple[str, ...] = ()) -> Iterator[str]:
    """This class's own keys, then those of each class below it. A class that was shown is not shown again."""
    fields = {name: field for name, field in schema.model_fields.items() if name not in leave}
    below = [(f"{path}{name}", option) for name, field in fields.items() for option in classes_in(field.annotation)]
    rows = [_row(f"{path}{name}", field) for name, field in fields.items() if not classes_in(field.annotation) and name != "type"]
    if rows:
        yield "| key | values | default | |\n|---|---|---|---|\n" + "".join(rows)
    for key, option in below:
        tag = option.model_fields.get("type")
        chosen = f", type {_literals(tag.annotation)}" if tag else ""
        said = " ".join(inspect.cleandoc(option.__dict__.get("__doc__") or "").split())
        yield f"### `{key}`{chosen}\n" + (f"\n{_plain(said)}\n" if said else "")
        if option in seen:
            yield f"Keys as under `{seen[option]}`.\n"
            continue
        seen[option] = key
        yield from _sections(f"{key}.", option, seen)


def _row(key: str, field: FieldInfo) -> str:
    default = "" if field.default is PydanticUndefined else "none" if field.default is None else _shown(field.default)
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
    names = {"str": "text", "int": "integer", "float": "number", "bool": "true or false", "Path": "path"}
    return names.get(getattr(annotation, "__name__", ""), getattr(annotation, "__name__", str(annotation)))


def _literals(annotation: Any) -> str:
    return ", ".join(f"`{value}`" for value in get_args(annotation))


def _plain(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(markdown(), end="")
