"""Examples as flat arrays: the only form of token data between the ingress and the workers.

Two examples of lengths 3 and 2 are::

    Columns(
        tokens=[5, 6, 7, 8, 9],
        offsets=[0, 3, 5],
        fields={"target_tokens": [6, 7, 2, 9, 2], "weights": [0, 1, 1, 1, 1]},
    )

Inputs arrive already shifted: position i of `tokens` predicts position i of `target_tokens`. Every
other field aligns with the targets.

A position may have several targets, as in distillation towards the K likeliest tokens of a teacher.
Then every field is [ΣT, K]. Rows with fewer targets are padded with target 0 of weight 0. `widths`
has the number of targets of each row.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.messages.answer_only import whole_rows
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.example import TARGETS, WEIGHTS, Example
from skyrl_actors.messages.images import Images, Picture, PlacedImage, images_of

MAX_DATUMS = 1024  # of one request; SDKs split longer batches


def check_num_datums(number: int) -> None:
    """Raise InvalidRequest for a request with too many datums."""
    if number > MAX_DATUMS:
        raise InvalidRequest(f"{number} datums in one request; at most {MAX_DATUMS}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """A batch of N examples with ΣT tokens together."""

    tokens: NDArray[np.int32]  # [ΣT] int32
    offsets: NDArray[np.int64]  # [N+1] int64; row i is tokens[offsets[i]:offsets[i+1]]
    # each [ΣT] or [ΣT, K]; target_tokens is int32, all others are float32
    fields: dict[str, NDArray[np.generic]]
    # [N] targets of a position in each row, 0 for a row sent as [T]; None: fields are [ΣT]
    widths: NDArray[np.int64] | None = None
    # [ΣT, layers · k] uint8 or int16: the experts of each token in the engine, number + 1, 0 where
    # it is not known; None: the trainer's routers choose
    routes: NDArray[np.generic] | None = None
    images: Images | None = None
    # [N] positions in front of each row for which the client sent no inputs; None: 0 in all
    fronts: NDArray[np.int64] | None = None

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_routed(self) -> int:
        """The number of tokens with routes."""
        return 0 if self.routes is None else int(self.routes.any(1).sum())

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of every field and output: (ΣT,) or (ΣT, K)."""
        return (
            (self.num_tokens,) if self.widths is None else (self.num_tokens, int(self.widths.max()))
        )

    @property
    def lengths(self) -> NDArray[np.int64]:  # [N]
        return np.diff(self.offsets)

    def positions(self, rows: Sequence[int]) -> NDArray[np.int64]:
        """Return the flat positions of these rows, in their order: [Σ lengths of rows] int64."""
        chosen = np.asarray(rows, np.int64)
        lengths = self.lengths[chosen]
        ends = np.cumsum(lengths)
        begins = self.offsets[chosen] - (ends - lengths)  # of each row, less what is before it
        return np.repeat(begins, lengths) + np.arange(lengths.sum(), dtype=np.int64)

    @property
    def nbytes(self) -> int:
        return (
            self.tokens.nbytes
            + self.offsets.nbytes
            + sum(array.nbytes for array in self.fields.values())
            + (0 if self.routes is None else self.routes.nbytes)
            + (0 if self.images is None else self.images.nbytes)
        )

    def only(self, rows: Sequence[int]) -> "Columns":
        """Return a batch of these rows, in their order."""
        where = self.positions(rows)
        chosen, lengths = np.asarray(rows, np.int64), self.lengths[list(rows)]
        return Columns(
            tokens=self.tokens[where],
            offsets=offsets_of(lengths.tolist()),
            fields={name: array[where] for name, array in self.fields.items()},
            widths=None if self.widths is None else self.widths[chosen],
            routes=None if self.routes is None else self.routes[where],
            images=images_of([self.pictures_of(row) for row in rows], lengths.tolist()),
        )

    def pictures_of(self, row: int) -> list[Picture]:
        """Return the images of a row, with their places in it."""
        begin = int(self.offsets[row])
        return [
            Picture(one.start - begin, one.digest, one.content, one.grid, one.num_tokens)
            for one in self.images_of(row)
        ]

    def images_of(self, row: int) -> Iterator[PlacedImage]:
        """Yield the images of a row in their order."""
        if self.images is not None:
            start, stop = self.offsets[row : row + 2].tolist()
            yield from self.images.between(start, stop)


def offsets_of(lengths: Iterable[int]) -> NDArray[np.int64]:
    """Return the [N+1] int64 cumulative offsets of rows with these lengths."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.fromiter(lengths, np.int64))])


def columns_from(examples: Sequence[Example], limit_bytes: int = 2**31) -> Columns:
    """Flatten examples. All must have the same fields, with one row of values for each token.

    Weights may be left out, and inputs may cover the end of a row only (`answer_only.py`). Raises
    InvalidRequest with the datum, the field and both lengths.
    """
    if not examples:
        raise InvalidRequest("data is empty: send at least one datum")
    examples, fronts = whole_rows(examples)
    names = examples[0].fields.keys()
    widths = [_checked_width(i, example, names) for i, example in enumerate(examples)]
    tokens = np.concatenate([example.tokens for example in examples]).astype(np.int32, copy=False)
    offsets = offsets_of(len(example.tokens) for example in examples)
    widest = max(widths)
    if len(tokens) * max(widest, 1) * 4 * max(len(names), 1) > limit_bytes:
        raise InvalidRequest(
            f"{len(tokens)} tokens with up to {widest} targets each need more than "
            f"{limit_bytes} bytes; send fewer"
        )
    if widest and WEIGHTS not in names:
        examples = [
            replace(e, fields={**e.fields, WEIGHTS: np.ones(e.fields[TARGETS].shape, np.float32)})
            for e in examples
        ]
    fields: dict[str, NDArray[np.generic]] = {}
    for name in examples[0].fields:
        if name == TARGETS and not all(_are_ids(example.fields[name]) for example in examples):
            raise InvalidRequest(
                f"{TARGETS} has a value that is no token id: a whole number of 32 bits"
            )
        arrays = [
            _widened(example.fields[name], widest) if widest else example.fields[name]
            for example in examples
        ]
        # A value that is too large becomes infinite, which is refused later.
        with np.errstate(over="ignore"):
            fields[name] = np.concatenate(arrays).astype(
                np.int32 if name == TARGETS else np.float32, copy=False
            )
    return Columns(
        tokens=tokens,
        offsets=offsets,
        fields=fields,
        widths=np.asarray(widths, np.int64) if widest else None,
        images=images_of([each.pictures for each in examples], np.diff(offsets).tolist()),
        fronts=fronts,
    )


def _checked_width(index: int, example: Example, names: Collection[str]) -> int:
    """Return K of a datum whose fields are [T, K], or 0 if they are [T]."""
    if not len(example.tokens):
        raise InvalidRequest(f"datum {index} has no tokens")
    if example.fields.keys() != names:
        raise InvalidRequest(
            f"datum {index} has loss_fn_inputs {sorted(example.fields)}, "
            f"datum 0 has {sorted(names)}: "
            "every datum of one request must have the same inputs, except weights, which are 1 "
            "where they are left out"
        )
    shapes = {name: array.shape for name, array in example.fields.items()}
    for name, shape in shapes.items():
        if len(shape) not in (1, 2) or shape[0] != len(example.tokens) or 0 in shape:
            raise InvalidRequest(
                f"datum {index}: {name} has shape {shape}, "
                f"model_input has {len(example.tokens)} tokens; "
                "send one value for each input token, or K values for each as (tokens, K)"
            )
    if len(set(shapes.values())) > 1:
        raise InvalidRequest(
            f"datum {index}: its inputs have shapes {shapes}; all must have the same"
        )
    if any(len(shape) == 2 for shape in shapes.values()):
        if TARGETS not in shapes:
            raise InvalidRequest(
                f"datum {index}: inputs with K values for each token need {TARGETS} of that shape"
            )
        return next(iter(shapes.values()))[1]
    return 0


def _widened(array: NDArray[np.generic], width: int) -> NDArray[np.generic]:
    """Pad [T] or [T, k] with zeros to [T, width]."""
    wide = np.zeros((len(array), width), array.dtype)
    narrow = array[:, None] if array.ndim == 1 else array
    wide[:, : narrow.shape[1]] = narrow
    return wide


def _are_ids(array: NDArray[Any]) -> bool:
    """Return whether all values are whole numbers of 32 bits, also in an array of floats."""
    if not array.size:
        return True
    is_whole = array.dtype.kind in "iu" or bool((np.trunc(array) == array).all())  # not if NaN
    return is_whole and array.min() >= -(2**31) and array.max() < 2**31
