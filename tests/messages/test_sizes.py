"""Estimates of the memory of messages."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from skyrl_actors.messages.requests import Sample, SamplingParams
from skyrl_actors.messages.sizes import NUMBER_BYTES, OBJECT_BYTES, size_of


@dataclass(frozen=True)
class Part:
    number: int | None = None
    text: str | None = None


@dataclass(frozen=True)
class Whole:
    flag: bool
    part: Part | None
    many: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Lists:
    pair: tuple[int, int]
    numbers: list[float]
    table: dict[int, int]
    number: int | float | None = None


@pytest.mark.parametrize(
    ("message", "size"),
    [
        (Part(), 3 * OBJECT_BYTES),
        (Part(number=3, text="abcd"), 3 * OBJECT_BYTES + 4),
        (Whole(True, None), 4 * OBJECT_BYTES),
        (Whole(True, Part(1, "ab"), (1, 2)), 5 * OBJECT_BYTES + 2 + 2 * NUMBER_BYTES),
        (Whole(True, None, (Part(), b"abc")), 8 * OBJECT_BYTES + 3),
        (Lists((1, 2), [0.5] * 9, {1: 2}, number=2.5), 5 * OBJECT_BYTES + 11 * NUMBER_BYTES),
        (np.zeros(10, np.float32), 40 + OBJECT_BYTES),
        ({"a": [1.0, 2.0]}, 2 * OBJECT_BYTES + 1 + 2 * NUMBER_BYTES),
    ],
)
def test_arrays_and_texts_count_by_length_and_others_by_a_constant(message: Any, size: int):
    assert size_of(message) == size


def test_a_long_prompt_or_stop_counts():
    params = SamplingParams(max_tokens=4)
    short = size_of(Sample(sampler_id="s", prompt=(1,), params=params))
    long = size_of(Sample(sampler_id="s", prompt=(1,) * 1001, params=params))
    assert long - short == 1000 * NUMBER_BYTES
    stops = SamplingParams(max_tokens=4, stop=("a" * 500,))
    assert size_of(stops) - size_of(params) == 500 + OBJECT_BYTES
