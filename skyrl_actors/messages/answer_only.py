"""Datums whose loss inputs cover the end of the row only, as SkyRL's clients send them.

The inputs of row [p, p, p, a, b] can be those of its answer [a, b, c] alone, where c is the last
target: they belong to the last three positions. The other positions get zeros and weight 0.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.example import TARGETS, WEIGHTS, Example


def whole_rows(examples: Sequence[Example]) -> tuple[list[Example], NDArray[np.int64] | None]:
    """Return the datums with inputs for every token, all with weights if one has them.

    Also return how many positions in front of each row had no inputs: [N] int64, or None where all
    had. Raises InvalidRequest for short inputs that do not end the row.
    """
    fronts = [_front_of(index, example) for index, example in enumerate(examples)]
    if not any(fronts) and (len({WEIGHTS in example.fields for example in examples}) < 2):
        return list(examples), None
    found = [_spread(one, front) for one, front in zip(examples, fronts, strict=True)]
    return found, np.asarray(fronts, np.int64) if any(fronts) else None


def _front_of(index: int, example: Example) -> int:
    lengths = {array.shape for array in example.fields.values()}
    targets, total = example.fields.get(TARGETS), len(example.tokens)
    if targets is None or targets.ndim != 1 or not 0 < len(targets) < total or len(lengths) > 1:
        return 0
    front = total - len(targets)
    is_answer = np.array_equal(targets[:-1], example.tokens[front + 1 :])
    # With an input that was not shortened, one position would have to predict itself.
    is_unshifted = front == 1 and np.array_equal(targets, example.tokens[1:])
    if not is_answer or is_unshifted:
        raise InvalidRequest(
            f"datum {index}: {TARGETS} has {len(targets)} values and model_input {total} tokens, "
            "and the targets do not continue the end of the input; send one value for each input "
            "token, whose target is the token after it (model_input without its last token, "
            "target_tokens without the first)"
        )
    return front


def _spread(example: Example, front: int) -> Example:
    """Add zeros in front of all inputs. Without weights, what was sent has weight 1."""
    fields = example.fields
    if WEIGHTS not in fields:
        like = next(iter(fields.values()), example.tokens)
        fields = {**fields, WEIGHTS: np.ones(like.shape, np.float32)}
    if front:
        fields = {name: np.pad(array, (front, 0)) for name, array in fields.items()}
    return replace(example, fields=fields)


def without_fronts(
    array: NDArray[np.float32], offsets: NDArray[np.int64], fronts: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return the values at positions that had inputs. `array` is [ΣT] or [ΣT, K]."""
    place = np.arange(len(array)) - np.repeat(offsets[:-1], np.diff(offsets))
    return array[place >= np.repeat(fronts, np.diff(offsets))]
