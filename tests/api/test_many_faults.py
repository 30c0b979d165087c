"""A body with very many faults is refused at once: the faults are not collected.

Routes that declare their body read it on the event loop.
"""

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from skyrl_actors import api
from skyrl_actors.api import wire


def declared() -> dict[str, type[BaseModel]]:
    """The bodies that routes declare, by name."""
    found = dict[str, type[BaseModel]]()
    for module in pkgutil.iter_modules(api.__path__):
        router = getattr(importlib.import_module(f"{api.__name__}.{module.name}"), "router", None)
        for route in getattr(router, "routes", ()):
            if isinstance(route, APIRoute):
                for body in route.dependant.body_params:
                    model: Any = body.field_info.annotation
                    assert issubclass(model, BaseModel)
                    found[model.__name__] = model
    return found


def collecting(schema: Any, path: str = "") -> Iterator[str]:
    """The parts of a schema that can have as many faults as the body has bytes."""
    if isinstance(schema, dict):
        kind = schema.get("type")
        if kind in ("list", "set", "frozenset", "tuple"):
            is_free = schema.get("items_schema", {}).get("type") == "any"
            if not (is_free or schema.get("fail_fast")):
                yield f"{path}: {kind}"
        if kind == "dict" and schema.get("values_schema", {}).get("type") != "any":
            yield f"{path}: {kind}"
        for key, part in schema.items():
            if key not in ("metadata", "serialization"):
                yield from collecting(part, f"{path}/{key}" if key != "schema" else path)
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from collecting(part, path)


def test_no_declared_body_collects_faults():
    bodies = declared()
    assert {"CreateSession", "SearchSessions", "OptimStep"} <= bodies.keys()
    found = {n: [*collecting(model.__pydantic_core_schema__)] for n, model in bodies.items()}
    assert not {name: parts for name, parts in found.items() if parts}


@pytest.mark.parametrize(
    "model, field, part",
    [
        (wire.CreateSession, "tags", [0] * 100_000),
        (wire.SearchSessions, "project_ids", [0] * 100_000),
        (wire.SearchSessions, "user_metadata", {str(n): 0 for n in range(100_000)}),
    ],
)
def test_the_first_fault_is_named(model: type[BaseModel], field: str, part: Any):
    with pytest.raises(ValidationError) as caught:
        model.model_validate({field: part})
    assert caught.value.error_count() == 1 and field in str(caught.value)
