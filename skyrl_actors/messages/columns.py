"""Many examples as flat arrays: the one form in which token data travels from the ingress to the workers.

Two examples of lengths 3 and 2 are::

    Columns(tokens=[5, 6, 7, 8, 9], offsets=[0, 3, 5], fields={"target_tokens": [6, 7, 2, 9, 2], "weights": [0, 1, 1, 1, 1]})

Inputs arrive already shifted: position i of `tokens` predicts position i of `target_tokens`, and every other field
aligns with the targets.

A position may have several targets (distillation towards the K likeliest tokens of a teacher): then every field is
[ΣT, K], filled up with target 0 of weight 0 where a row has fewer, and `widths` says what each row had.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.messages.errors import InvalidRequest

TARGETS = "target_tokens"
WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Example:
    """One datum as it was sent: tokens [T] int32 and per-token arrays by name, all [T] or all [T, K]."""

    tokens: NDArray[np.int32]
    fields: dict[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class Columns:
    tokens: NDArray[np.int32]  # [ΣT] int32
    offsets: NDArray[np.int64]  # [N+1] int64; row i is tokens[offsets[i]:offsets[i+1]]
    fields: dict[str, NDArray[np.generic]]  # each [ΣT] or [ΣT, K]: target_tokens int32, all others float32
    widths: NDArray[np.int64] | None = (
        None  # [N] targets of a position in each row, 0 for a row sent as [T]; None: fields are [ΣT]
    )

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of every field and output: (ΣT,) or (ΣT, K)."""
        return (self.num_tokens,) if self.widths is None else (self.num_tokens, int(self.widths.max()))

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


def columns_from(examples: Sequence[Example], limit_bytes: int = 2**31) -> Columns:
    """Flatten examples; each must carry the same field names, and every field one row of values for each token.

    Raises InvalidRequest naming the datum, the field and both lengths.
    """
    if not examples:
        raise InvalidRequest("data is empty: send at least one datum")
    names = examples[0].fields.keys()
    widths = [_checked_width(i, example, names) for i, example in enumerate(examples)]
    tokens = np.concatenate([example.tokens for example in examples]).astype(np.int32, copy=False)
    offsets = offsets_of(len(example.tokens) for example in examples)
    widest = max(widths)
    if len(tokens) * max(widest, 1) * 4 * max(len(names), 1) > limit_bytes:
        raise InvalidRequest(
            f"{len(tokens)} tokens with up to {widest} targets each are more than {limit_bytes} bytes; send fewer"
        )
    if widest and WEIGHTS not in names:
        examples = [Example(e.tokens, {**e.fields, WEIGHTS: np.ones(e.fields[TARGETS].shape, np.float32)}) for e in examples]
    fields: dict[str, NDArray[np.generic]] = {}
    for name in examples[0].fields:
        if name == TARGETS and any(_beyond_int32(example.fields[name]) for example in examples):
            raise InvalidRequest(f"{TARGETS} has a value that is no token id: it does not even fit 32 bits")
        arrays = [_widened(example.fields[name], widest) if widest else example.fields[name] for example in examples]
        with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused as that
            fields[name] = np.concatenate(arrays).astype(np.int32 if name == TARGETS else np.float32, copy=False)
    return Columns(tokens, offsets, fields, np.asarray(widths, np.int64) if widest else None)


def _checked_width(index: int, example: Example, names: Collection[str]) -> int:
    """K of a datum whose fields are [T, K], 0 of one whose fields are [T]."""
    if not len(example.tokens):
        raise InvalidRequest(f"datum {index} has no tokens")
    if example.fields.keys() != names:
        raise InvalidRequest(
            f"datum {index} has loss_fn_inputs {sorted(example.fields)}, datum 0 has {sorted(names)}: "
            "every datum of one request must have the same inputs"
        )
    shapes = {name: array.shape for name, array in example.fields.items()}
    for name, shape in shapes.items():
        if len(shape) not in (1, 2) or shape[0] != len(example.tokens) or 0 in shape:
            raise InvalidRequest(
                f"datum {index}: {name} has shape {shape}, model_input has {len(example.tokens)} tokens; "
                "send one value for each input token, or K values for each as (tokens, K)"
            )
    if len(set(shapes.values())) > 1:
        raise InvalidRequest(f"datum {index}: its inputs have shapes {shapes}; all must have the same")
    if any(len(shape) == 2 for shape in shapes.values()):
        if TARGETS not in shapes:
            raise InvalidRequest(f"datum {index}: inputs with K values for each token need {TARGETS} of that shape")
        return next(iter(shapes.values()))[1]
    return 0


def _widened(array: NDArray[np.generic], width: int) -> NDArray[np.generic]:
    """[T] or [T, k] -> [T, width], zeros behind."""
    wide = np.zeros((len(array), width), array.dtype)
    narrow = array[:, None] if array.ndim == 1 else array
    wide[:, : narrow.shape[1]] = narrow
    return wide


def _beyond_int32(array: NDArray[np.generic]) -> bool:
    wide = array.astype(np.int64)
    return bool(wide.size) and (int(wide.max()) >= 2**31 or int(wide.min()) < -(2**31))
