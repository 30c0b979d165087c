"""Run an uploaded loss on the tensors of one datum."""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from skyrl_actors.losses.custom_graph import FUNCTIONS, Graph
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.narrowing import is_array, is_mapping

MODULES: dict[str, Any] = {
    "torch": torch,
    "torch.nn.functional": F,
    "torch._C._nn": cast(Any, torch)._C._nn,
    "operator": operator,
    "math": math,
}
TABLE: dict[str, Callable[..., Any]] = {
    name: getattr(MODULES[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in FUNCTIONS
}


def run(graph: Graph, inputs: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and its metrics, all scalars.

    Raises:
        InvalidRequest: torch raises an error, or the output is not a scalar loss with metrics.
    """
    values: dict[str, Any] = {}
    try:
        for node in graph.nodes:
            args = [_value(arg, values) for arg in node.args]
            kwargs = {key: _value(arg, values) for key, arg in node.kwargs.items()}
            if node.op == "output":
                return _checked(graph, args[0])
            values[node.name] = _computed(node.op, node.target, args, kwargs, inputs)
    except (
        RuntimeError,
        TypeError,
        ValueError,
        IndexError,
        ArithmeticError,
        AttributeError,
        KeyError,
    ) as error:
        raise InvalidRequest(
            f"custom loss {graph.name!r} failed: {type(error).__name__}: {error}"
        ) from None
    raise InvalidRequest(f"custom loss {graph.name!r} has no output")


def _computed(
    op: str, target: str, args: list[Any], kwargs: dict[str, Any], inputs: Mapping[str, Tensor]
) -> Any:
    if op == "placeholder":
        return inputs[target]
    if op == "call_method":
        if not isinstance(args[0], Tensor):
            raise TypeError(f"{target} of a {type(args[0]).__name__}")
        return getattr(args[0], target)(*args[1:], **kwargs)
    if target.startswith("operator.") and target != "operator.getitem":
        # Python integers and lists could grow without bound.
        args = [arg if isinstance(arg, Tensor | bool) else float(arg) for arg in args]
    return TABLE[target](*args, **kwargs)


def _value(arg: Any, values: Mapping[str, Any]) -> Any:
    if is_array(arg):
        return [_value(item, values) for item in arg]
    if not is_mapping(arg):
        return arg
    ((kind, content),) = arg.items()
    match kind:
        case "ref":
            return values[content]
        case "tuple":
            return tuple(_value(item, values) for item in content)
        case "dict":
            return {key: _value(item, values) for key, item in content.items()}
        case "slice":
            return slice(*(_value(item, values) for item in content))
        case "ellipsis":
            return ...
        case "float":
            return float(content)
        case "dtype" if content in ("float32", "float64", "bool", "int64"):
            return getattr(torch, content)
        case _:
            raise ValueError(f"unknown kind of argument: {kind!r}")


def _checked(graph: Graph, output: Any) -> tuple[Tensor, dict[str, Tensor]]:
    loss, metrics = output
    if not isinstance(loss, Tensor) or loss.ndim:
        raise InvalidRequest(
            f"custom loss {graph.name!r} must return a scalar loss and a dict of scalar metrics"
        )
    for key, value in metrics.items():
        if not (
            key.startswith("custom/") and key.endswith((":sum", ":mean")) and key.count(":") == 1
        ):
            raise InvalidRequest(
                f"custom loss {graph.name!r}: metric {key!r} must be named custom/<name>:sum or "
                "custom/<name>:mean"
            )
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise InvalidRequest(f"custom loss {graph.name!r}: metric {key!r} is not a scalar")
    return loss, {key: value.detach().reshape(()) for key, value in metrics.items()}
