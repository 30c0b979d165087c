"""Tensors of requests: decode numbers, and convert sparse matrices within a limit."""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.api import schema
from skyrl_actors.api.compression import BodyTooLarge
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.narrowing import is_array, is_mapping

DTYPES = {
    schema.FLOAT32: np.float32,
    schema.INT64: np.int64,
    "float32": np.float32,
    "int64": np.int64,
}
_SPARSE = re.compile(rb'"sparse_crow_indices"\s*:\s*\[')


def numbers(what: str, data: object, dtype: Any) -> NDArray[Any]:
    """Convert a list to an array.

    Raises InvalidRequest for booleans, for fractions where `dtype` is one of integers, and for
    whole numbers that do not fit it.
    """
    if not is_array(data):
        raise InvalidRequest(f"{what} must be a list of numbers")
    is_whole = np.issubdtype(dtype, np.integer)
    allowed = {int} if is_whole else {int, float}
    # Numpy would convert true to 1.
    found = np.asarray(data) if {*map(type, data)} <= allowed else None
    if found is None or (found.size and found.dtype.kind not in "iuf"):
        raise InvalidRequest(
            f"{what} must be a list of {'whole ' * is_whole}numbers"
            f"{' of 64 bits' * (found is not None)}"
        )
    info = np.iinfo(dtype) if is_whole else None
    if (
        info is not None
        and found.size
        and (int(found.min()) < info.min or int(found.max()) > info.max)
    ):
        raise InvalidRequest(f"{what} has a number that does not fit {np.dtype(dtype).name}")
    with np.errstate(over="ignore"):
        return found.astype(dtype)


def array_of(data: bytes, dtype: Any, name: str) -> NDArray[Any]:
    """Return the array in these little-endian bytes."""
    try:
        return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))
    except ValueError as error:
        raise InvalidRequest(f"{name}: {error}") from None


def shaped(flat: NDArray[Any], shape: Sequence[int], what: str) -> NDArray[Any]:
    """Reshape; without a shape, the array stays one-dimensional."""
    if flat.ndim != 1:
        raise InvalidRequest(f"{what}: data must be a flat list; give its shape in `shape`")
    if not shape:
        return flat
    if min(shape) < 0 or math.prod(shape) != flat.size:
        raise InvalidRequest(f"{what} has {flat.size} values but shape {list(shape)}")
    try:
        return flat.reshape(shape)
    except ValueError as error:  # a dimension of 0 beside very large ones
        raise InvalidRequest(f"{what} has shape {list(shape)}: {error}") from None


class SparseBound:
    """Convert CSR matrices to dense ones; all of a request may have `limit` bytes."""

    def __init__(self, limit: int):
        self._limit = limit
        self._taken = 0

    def dense(
        self,
        what: str,
        shape: Sequence[int],
        values: NDArray[Any],
        crow: NDArray[Any],
        col: NDArray[Any],
    ) -> NDArray[Any]:
        """Return [T, K]. Cells that are not listed are 0."""
        if len(shape) != 2 or min(shape) < 0:
            raise InvalidRequest(
                f"{what} is sparse and has shape {list(shape)}; a sparse tensor has two dimensions"
            )
        self._taken += shape[0] * shape[1] * values.itemsize
        if self._taken > self._limit:
            raise BodyTooLarge(
                f"{what} has shape {list(shape)}: "
                f"as dense tensors, the request has more than {self._limit} bytes"
            )
        counts = np.diff(crow)
        is_csr = (
            len(crow) == shape[0] + 1
            and crow[0] == 0
            and (counts >= 0).all()
            and crow[-1] == len(col) == len(values)
        )
        if not is_csr or (len(col) and (col.min() < 0 or col.max() >= shape[1])):
            raise InvalidRequest(f"{what} is not a CSR matrix of shape {list(shape)}")
        dense = shaped(np.zeros(shape[0] * shape[1], values.dtype), shape, what)
        dense[np.repeat(np.arange(shape[0]), counts), col] = values
        return dense


def sparse_bytes_of_proto(message: Any) -> int:
    """Return the bytes that the sparse tensors of a batch have as dense ones."""
    return sum(
        _item_bytes(tensor.dtype) * math.prod(tensor.shape)
        for datum in message.data
        for tensor in datum.loss_fn_inputs.values()
        if tensor.WhichOneof("kind") == "sparse_csr" and min(tensor.shape, default=0) > 0
    )


def may_be_sparse(body: bytes) -> bool:
    """Return whether a JSON batch has a sparse tensor, as SDKs write it."""
    return _SPARSE.search(body) is not None


def sparse_bytes_of_json(data: object) -> int:
    """Return the bytes that the sparse tensors of these datums have as dense ones."""
    total = 0
    for datum in data if is_array(data) else ():
        fields = datum.get("loss_fn_inputs") if is_mapping(datum) else None
        for tensor in fields.values() if is_mapping(fields) else ():
            if not is_mapping(tensor) or tensor.get("sparse_crow_indices") is None:
                continue
            shape = tensor.get("shape")
            if is_array(shape) and all(type(one) is int and one > 0 for one in shape):
                total += _item_bytes(tensor.get("dtype")) * math.prod(shape)
    return total


def _item_bytes(dtype: object) -> int:
    """Return the bytes of a cell. A tensor of an unknown dtype is refused later."""
    known = DTYPES.get(dtype) if isinstance(dtype, str | int) else None
    return 8 if known is None else np.dtype(known).itemsize
