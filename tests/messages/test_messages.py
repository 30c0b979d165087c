import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_actors.messages import errors
from skyrl_actors.messages.columns import columns_from
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.example import Example
from skyrl_actors.messages.paths import parse_path
from skyrl_actors.messages.results import Failure


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_columns_keep_every_row(lengths: list[int]):
    rng = np.random.default_rng(0)
    examples = [
        Example(
            rng.integers(0, 99, n).astype(np.int32), {"weights": rng.random(n).astype(np.float32)}
        )
        for n in lengths
    ]
    columns = columns_from(examples)
    assert columns.lengths.tolist() == lengths
    for i, example in enumerate(examples):
        where = columns.positions([i])
        assert (columns.tokens[where] == example.tokens).all()
        assert (columns.fields["weights"][where] == example.fields["weights"]).all()


def test_column_errors_name_the_datum_and_the_field():
    good = Example(np.arange(3, dtype=np.int32), {"weights": np.ones(3, np.float32)})
    short = Example(np.arange(3, dtype=np.int32), {"weights": np.ones(2, np.float32)})
    other = Example(np.arange(3, dtype=np.int32), {"advantages": np.ones(3, np.float32)})
    with pytest.raises(
        InvalidRequest, match=r"datum 1: weights has shape \(2,\), model_input has 3 tokens"
    ):
        columns_from([good, short])
    with pytest.raises(InvalidRequest, match="datum 1 has loss_fn_inputs"):
        columns_from([good, other])
    with pytest.raises(InvalidRequest, match="empty"):
        columns_from([])


@pytest.mark.parametrize(
    "path",
    [
        "",
        "tinker://",
        "tinker://a/weights",
        "tinker://a/weights/",
        "tinker://a/weights/b/c",
        "tinker://../weights/b",
        "tinker://a/weights/..",
        "tinker://a/other/b",
        "file:///etc/passwd",
        "tinker://a/weights/.hidden",
        "tinker://a/weights/b\n",
    ],
)
def test_bad_tinker_paths_are_refused(path: str):
    with pytest.raises(InvalidRequest):
        parse_path(path)


def test_good_tinker_path():
    path = parse_path("tinker://s1:train:0/sampler_weights/step-0010")
    assert (path.model_id, path.kind, path.name) == ("s1:train:0", "sampler_weights", "step-0010")
    assert str(path) == "tinker://s1:train:0/sampler_weights/step-0010"


@given(st.text(max_size=60))
def test_any_text_is_a_valid_path_or_raises_invalid_request(text: str):
    try:
        path = parse_path(text)
    except InvalidRequest:
        return
    assert "/" not in path.model_id + path.name
    assert ".." not in (path.model_id, path.name)


@pytest.mark.parametrize(
    "name",
    [
        "UserError",
        "InvalidRequest",
        "NotFound",
        "Conflict",
        "CapacityError",
        "ConfigError",
        "InternalError",
    ],
)
def test_errors_pickle(name: str):
    error = getattr(errors, name)("what was wrong")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error) and str(back) == "what was wrong"
    assert Failure.of(error).category == error.category
