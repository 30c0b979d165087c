"""Losses that users trace with torch.fx and upload (pure).

The id of a loss is its compressed graph. The server therefore stores nothing, and a replay finds
the loss in the request. A graph contains no code: it names operations of the lists in this file.
They compute with numbers and tensors, and their results are not larger than their inputs.
"""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.narrowing import is_mapping, is_sequence

MAX_NODES, MAX_BYTES, MAX_DEPTH = 512, 64 * 2**10, 8
PREFIX = "loss-"
ELEMENTWISE = [
    "abs",
    "add",
    "clamp",
    "clip",
    "div",
    "eq",
    "erf",
    "exp",
    "expm1",
    "floor",
    "ge",
    "gt",
    "isfinite",
    "isnan",
    "le",
    "log",
    "log1p",
    "log2",
    "log10",
    "logaddexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "lt",
    "maximum",
    "minimum",
    "mul",
    "nan_to_num",
    "ne",
    "neg",
    "pow",
    "reciprocal",
    "relu",
    "round",
    "rsqrt",
    "rsub",
    "sigmoid",
    "sign",
    "sqrt",
    "square",
    "sub",
    "tanh",
    "where",
]
REDUCTIONS = [
    "amax",
    "amin",
    "any",
    "all",
    "cumsum",
    "logsumexp",
    "max",
    "mean",
    "min",
    "prod",
    "softmax",
    "log_softmax",
    "std",
    "sum",
    "var",
]
SHAPES = ["flip", "gather", "squeeze", "unsqueeze", "zeros_like", "ones_like"]
NEURAL = [
    "elu",
    "gelu",
    "huber_loss",
    "leaky_relu",
    "logsigmoid",
    "relu",
    "relu6",
    "sigmoid",
    "silu",
    "smooth_l1_loss",
    "softplus",
    "tanh",
]
METHODS = frozenset(
    [
        *ELEMENTWISE,
        *REDUCTIONS,
        *SHAPES,
        "detach",
        "float",
        "double",
        "bool",
        "size",
        "numel",
        "masked_fill",
        "clone",
    ]
)
FUNCTIONS = frozenset(
    [f"torch.{name}" for name in (*ELEMENTWISE, *REDUCTIONS, *SHAPES)]
    + [f"torch.nn.functional.{name}" for name in NEURAL]
    # torch.fx records three functions of NEURAL under these names.
    + [f"torch._C._nn.{name}" for name in ("gelu", "log_sigmoid", "softplus")]
    + [
        f"operator.{name}"
        for name in [
            "abs",
            "add",
            "and_",
            "eq",
            "ge",
            "getitem",
            "gt",
            "invert",
            "le",
            "lt",
            "mul",
            "ne",
            "neg",
            "or_",
            "pow",
            "sub",
            "truediv",
        ]
    ]
    + [f"math.{name}" for name in ["exp", "log", "sqrt", "tanh"]]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of a torch.fx graph."""

    op: str
    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A checked graph.

    `inputs` are the keys of loss_fn_inputs that follow the logprobs. `ranks` holds the number of
    dimensions of each input, the logprobs included.
    """

    name: str
    inputs: tuple[str, ...]
    ranks: tuple[int, ...]
    nodes: tuple[Node, ...]


def loss_id_of(name: str, inputs: Sequence[Mapping[str, Any]], graph: Mapping[str, Any]) -> str:
    """Return the id of a graph.

    Raises:
        InvalidRequest: The graph is not allowed.
    """
    content = json.dumps(
        {"name": name, "inputs": list(inputs), "graph": dict(graph)},
        sort_keys=True,
        separators=(",", ":"),
    )
    loss_id = PREFIX + base64.urlsafe_b64encode(zlib.compress(content.encode(), 9)).decode()
    graph_of(loss_id)
    return loss_id


@lru_cache(maxsize=256)
def graph_of(loss_id: str) -> Graph:
    """Decode and check the graph of an id.

    Raises:
        InvalidRequest: The id cannot be decoded, or its graph is not allowed.
    """
    try:
        unpacked = zlib.decompressobj()
        content = unpacked.decompress(
            base64.b64decode(loss_id.removeprefix(PREFIX), b"-_", validate=True), MAX_BYTES
        )
        if unpacked.unconsumed_tail or not loss_id.startswith(PREFIX):
            raise ValueError("it is too large or has no prefix loss-")
        return _graph(json.loads(content))
    except (ValueError, zlib.error, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidRequest(
            f"loss_id is not an answer of create_custom_loss: {type(error).__name__}: {error}"
        ) from None


def _graph(content: Mapping[str, Any]) -> Graph:
    name, inputs = str(content["name"])[:80], content["inputs"]
    names, ranks = tuple(one["name"] for one in inputs), tuple(one["rank"] for one in inputs)
    if (
        not names
        or names[0] != "logprobs"
        or not all(isinstance(one, str) for one in names)
        or len(set(names)) != len(names)
    ):
        raise InvalidRequest(
            f"custom loss {name!r}: its inputs must be logprobs, followed by keys of "
            "loss_fn_inputs, each once"
        )
    if set(ranks) not in ({1}, {2}):
        raise InvalidRequest(
            f"custom loss {name!r}: its inputs have the ranks {ranks}; "
            "all must have one dimension, or all two"
        )
    nodes = content["graph"]["nodes"]
    if content["graph"].get("format", 1) != 1 or not 0 < len(nodes) <= MAX_NODES:
        raise InvalidRequest(
            f"custom loss {name!r}: the graph has {len(nodes)} nodes and the format "
            f"{content['graph'].get('format')}; it must have 1 to {MAX_NODES} nodes and format 1"
        )
    made = tuple(
        Node(
            op=n["op"],
            name=n["name"],
            target=n["target"],
            args=tuple(n.get("args", ())),
            kwargs=dict(n.get("kwargs", {})),
        )
        for n in nodes
    )
    _check(name, made, names)
    return Graph(name=name, inputs=names[1:], ranks=ranks, nodes=made)


def _check(name: str, nodes: Sequence[Node], inputs: Sequence[str]) -> None:
    seen: set[str] = set()
    for node in nodes:
        allowed = {
            "placeholder": node.target in inputs,
            "call_function": node.target in FUNCTIONS,
            "call_method": node.target in METHODS,
            "output": True,
        }
        if not allowed.get(node.op, False):
            raise InvalidRequest(
                f"custom loss {name!r}: {node.op} {node.target!r} is not allowed; "
                "run this loss on the client instead"
            )
        _check_argument(name, [node.args, dict(node.kwargs)], seen, 0)
        seen.add(node.name)
    if [node.op for node in nodes].count("output") != 1 or nodes[-1].op != "output":
        raise InvalidRequest(f"custom loss {name!r}: it must have one output, as its last node")


def _check_argument(name: str, value: Any, seen: set[str], depth: int) -> None:
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"custom loss {name!r}: arguments nested deeper than {MAX_DEPTH}")
    if is_mapping(value):
        if isinstance(ref := value.get("ref"), str) and ref not in seen:
            raise InvalidRequest(
                f"custom loss {name!r}: node {ref!r} is used before its definition"
            )
        for item in value.values():
            _check_argument(name, item, seen, depth + 1)
    elif is_sequence(value):
        for item in value:
            _check_argument(name, item, seen, depth + 1)
