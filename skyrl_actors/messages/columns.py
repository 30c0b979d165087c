"""Many examples as flat arrays: the one form in which token data travels from the ingress to the workers.

Two examples of lengths 3 and 2 are::

    Columns(tokens=[5, 6, 7, 8, 9], offsets=[0, 3, 5], fields={"target_tokens": [6, 7, 2, 9, 2], "weights": [0, 1, 1, 1, 1]})

Inputs arrive already shifted: position i of `tokens` predicts position i of `target_tokens`, and every other field
aligns with the targets.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.messages.errors import InvalidRequest

TARGETS = "target_tokens"


@dataclass(frozen=True, slots=True)
class Example:
    """One datum as it was sent: tokens [T] int32 and per-token arrays [T] by name."""

    tokens: NDArray[np.int32]
    fields: dict[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class Columns:
    tokens: NDArray[np.int32]  # [ΣT] int32
    offsets: NDArray[np.int64]  # [N+1] int64; row i is tokens[offsets[i]:offsets[i+1]]
    fields: dict[str, NDArray[np.generic]]  # each [ΣT]: target_tokens int32, all others float32

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> NDArray[np.int64]:  # [N]
        return np.diff(self.offsets)

    def positions(self, rows: Sequence[int]) -> NDArray[np.int64]:
        """Flat positions of the given rows, in their order. [Σ lengths of rows] int64"""
        if not len(rows):
            return np.zeros(0, np.int64)
        return np.concatenate([np.arange(int(self.offsets[r]), int(self.offsets[r + 1]), dtype=np.int64) for r in rows])

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.offsets.nbytes + sum(array.nbytes for array in self.fields.values())


def offsets_of(lengths: Iterable[int]) -> NDArray[np.int64]:
    """[N+1] int64 cumulative offsets of rows with these lengths."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.fromiter(lengths, np.int64))])


def columns_from(examples: Sequence[Example]) -> Columns:
    """Flatten examples; each must carry the same field names, and every field one value for each token.

    Raises InvalidRequest naming the datum, the field and both lengths.
    """
    if not examples:
        raise InvalidRequest("data is empty: send at least one datum")
    names = examples[0].fields.keys()
    for i, example in enumerate(examples):
        if not len(example.tokens):
            raise InvalidRequest(f"datum {i} has no tokens")
        if example.fields.keys() != names:
            raise InvalidRequest(
                f"datum {i} has loss_fn_inputs {sorted(example.fields)}, datum 0 has {sorted(names)}: "
                "every datum of one request must have the same inputs"
            )
        for name, array in example.fields.items():
            if array.shape != example.tokens.shape:
                raise InvalidRequest(
                    f"datum {i}: {name} has shape {tuple(array.shape)}, model_input has {len(example.tokens)} tokens; "
                    "send one value for each input token"
                )
    tokens = np.concatenate([example.tokens for example in examples]).astype(np.int32, copy=False)
    fields: dict[str, NDArray[np.generic]] = {}
    for name in names:
        if name == TARGETS and any(_beyond_int32(example.fields[name]) for example in examples):
            raise InvalidRequest(f"{TARGETS} has a value that is no token id: it does not even fit 32 bits")
        dtype = np.int32 if name == TARGETS else np.float32
        fields[name] = np.concatenate([example.fields[name] for example in examples]).astype(dtype, copy=False)
    return Columns(tokens, offsets_of(len(example.tokens) for example in examples), fields)


def _beyond_int32(array: NDArray[np.generic]) -> bool:
    wide = array.astype(np.int64)
    return bool(wide.size) and (int(wide.max()) >= 2**31 or int(wide.min()) < -(2**31))
