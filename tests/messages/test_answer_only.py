"""Loss inputs that cover the end of a row only, and weights that some datums leave out."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_actors.messages.answer_only import without_fronts
from skyrl_actors.messages.columns import Columns, columns_from
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.example import Example


def example(prompt: list[int], answer: list[int], front: int = 0, **fields: Any) -> Example:
    """A datum in SkyRL's form: the input lacks the answer's last token. `front`: zeros before."""
    padded = {name: [0.0] * front + list(values) for name, values in fields.items()}
    return Example(
        np.asarray(prompt + answer[:-1], np.int32),
        {
            "target_tokens": np.asarray([0] * front + answer, np.int64),
            **{name: np.asarray(values, np.float32) for name, values in padded.items()},
        },
    )


def same(one: Columns, other: Columns) -> None:
    assert np.array_equal(one.tokens, other.tokens) and np.array_equal(one.offsets, other.offsets)
    assert one.fields.keys() == other.fields.keys()
    for name, array in one.fields.items():
        assert array.dtype == other.fields[name].dtype
        assert np.array_equal(array, other.fields[name]), name


tokens = st.lists(st.integers(0, 99), min_size=1, max_size=6)


@given(st.lists(st.tuples(tokens, tokens, st.booleans()), min_size=1, max_size=5))
def test_inputs_of_the_answer_equal_full_ones_with_weight_0_before_it(rows: list[Any]):
    # No token is in both, because a row of equal tokens is refused (below).
    rows = [([100 + token for token in prompt], *others) for prompt, *others in rows]
    short, full, values = [], [], []
    for prompt, answer, has_weights in rows:
        own = {"advantages": [float(a) - 3 for a in answer]}
        weights = [0.5] * len(answer) if has_weights else [1.0] * len(answer)
        given_weights = {"weights": weights} if has_weights else {}
        short.append(example(prompt, answer, **given_weights, **own))
        front = len(prompt) - 1
        full.append(example(prompt, answer, front=front, weights=weights, **own))
        values += [None] * front + [*map(float, answer)]
    made, wanted = columns_from(short), columns_from(full)
    if made.fronts is None:  # all prompts have one token: nothing was left out
        assert all(len(prompt) == 1 for prompt, _, _ in rows)
        return
    same(made, wanted)
    assert made.fronts.tolist() == [len(prompt) - 1 for prompt, _, _ in rows]
    output = np.asarray([-1.0 if value is None else value for value in values], np.float32)
    sent = [float(token) for _, answer, _ in rows for token in answer]
    assert without_fronts(output, made.offsets, made.fronts).tolist() == sent


def test_a_datum_without_weights_has_weight_1_beside_one_with_weights():
    made = columns_from([example([1], [2, 3], weights=[0.0, 2.0]), example([4], [5])])
    assert made.fields["weights"].tolist() == [0.0, 2.0, 1.0] and made.fronts is None


@pytest.mark.parametrize(
    ("datum", "why"),
    [
        # The classic mistake: targets are shifted, and the input is not.
        (
            Example(np.asarray([1, 2, 3, 4], np.int32), {"target_tokens": np.asarray([2, 3, 4])}),
            "the targets do not continue the end of the input",
        ),
        # The same mistake where every token is equal, and with one target.
        (
            Example(np.asarray([7, 7, 7], np.int32), {"target_tokens": np.asarray([7, 7])}),
            "the targets do not continue the end of the input",
        ),
        (
            Example(np.asarray([1, 2], np.int32), {"target_tokens": np.asarray([2])}),
            "the targets do not continue the end of the input",
        ),
        (
            Example(
                np.asarray([1, 2, 3, 4], np.int32),
                {"target_tokens": np.asarray([4, 5]), "advantages": np.ones(4, np.float32)},
            ),
            r"target_tokens has shape \(2,\), model_input has 4 tokens",
        ),
        (
            Example(np.asarray([1, 2, 3], np.int32), {"returns": np.ones(2, np.float32)}),
            r"returns has shape \(2,\), model_input has 3 tokens",
        ),
        (
            Example(np.asarray([1, 2], np.int32), {"target_tokens": np.asarray([2, 3, 4])}),
            r"target_tokens has shape \(3,\), model_input has 2 tokens",
        ),
    ],
)
def test_what_can_be_read_in_several_ways_is_refused_by_name(datum: Example, why: str):
    with pytest.raises(InvalidRequest, match=why):
        columns_from([datum])


def test_other_inputs_must_be_the_same_in_all_datums():
    with pytest.raises(InvalidRequest, match=r"datum 1 has loss_fn_inputs \['target_tokens'\]"):
        columns_from([example([1], [2], advantages=[1.0]), example([1], [2])])
