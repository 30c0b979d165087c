import contextlib
import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hn

from skyrl_actors.journal.encoding import TYPES, decode, encode, from_json, to_json
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.errors import Corrupt
from skyrl_actors.messages.model import AdamParams, LoraSpec, LossCall, ModelSpec
from skyrl_actors.messages.weights import SamplerWeights, TensorEntry, WeightManifest

ARRAYS = hn.arrays(
    st.sampled_from([np.int32, np.int64, np.float32]),
    hn.array_shapes(min_dims=1, max_dims=2, min_side=0),
)
TEXT = st.text(max_size=20)
NUMBERS = st.floats(allow_nan=False)
STOPS = st.none() | st.lists(TEXT).map(tuple) | st.lists(st.integers(0, 2**31)).map(tuple)
MESSAGES = st.one_of(
    st.builds(
        rq.CreateModel,
        spec=st.builds(
            ModelSpec,
            model_id=TEXT,
            base_model=TEXT,
            lora=st.none() | st.builds(LoraSpec, rank=st.integers(1, 64)),
        ),
        session_id=TEXT,
        user_metadata=st.dictionaries(TEXT, TEXT),
    ),
    st.builds(
        rq.ForwardBackward,
        model_id=TEXT,
        columns=st.builds(
            Columns, tokens=ARRAYS, offsets=ARRAYS, fields=st.dictionaries(TEXT, ARRAYS)
        ),
        loss=st.builds(LossCall, TEXT, st.dictionaries(TEXT, NUMBERS)),
        forward_only=st.booleans(),
        seq_id=st.none() | st.integers(0, 2**62),
    ),
    st.builds(rq.OptimStep, TEXT, st.builds(AdamParams, learning_rate=NUMBERS)),
    st.builds(
        rq.Sample,
        sampler_id=TEXT,
        prompt=st.lists(st.integers(0, 2**31)).map(tuple),
        params=st.builds(rq.SamplingParams, max_tokens=st.integers(1, 99), stop=STOPS),
    ),
    st.builds(
        rs.LossOutput,
        offsets=ARRAYS,
        fields=st.dictionaries(TEXT, ARRAYS),
        metrics=st.dictionaries(TEXT, NUMBERS),
    ),
    st.builds(rs.Failure, TEXT),
    st.builds(rs.StepDone, st.dictionaries(TEXT, NUMBERS)),
    st.builds(
        rs.SampleOutput,
        sequences=st.lists(
            st.builds(rs.Sequence, tokens=ARRAYS, logprobs=ARRAYS, stop_reason=TEXT)
        ).map(tuple),
        version=TEXT,
        prompt_logprobs=st.none() | ARRAYS,
    ),
)


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return (
            isinstance(b, np.ndarray)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and a.tobytes() == b.tobytes()
        )
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(
            same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a)
        )
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return (
            isinstance(b, tuple)
            and len(a) == len(b)
            and all(same(x, y) for x, y in zip(a, b, strict=True))
        )
    return a == b


@given(MESSAGES)
def test_messages_are_decoded_unchanged(message: object):
    assert same(decode(encode(message)), message)


def test_a_clients_key_may_equal_the_type_tag():
    message = rq.CreateModel(
        spec=ModelSpec(model_id="m", base_model="tiny"),
        session_id="s",
        user_metadata={"$": "Popen", "": "x"},
    )
    assert decode(encode(message)) == message
    assert from_json(to_json(rs.StepDone({"$": 1.0}))) == rs.StepDone({"$": 1.0})


def test_every_request_and_result_type_can_be_encoded():
    import typing

    for union in (rq.Request, rs.Result):
        for cls in typing.get_args(union):
            assert TYPES[cls.__name__] is cls


def test_weights_are_encoded_as_json_and_back():
    weights = SamplerWeights(
        version="v",
        parts=(
            WeightManifest(
                version="v",
                kind="full",
                path="/x",
                num_bytes=3,
                tensors=(TensorEntry("a.b", (2, 3), "float32", 0),),
                write_s=0.5,
            ),
        ),
    )
    assert from_json(to_json(weights)) == weights


@given(st.binary(max_size=200))
def test_decoding_other_bytes_raises_only_corrupt(content: bytes):
    with contextlib.suppress(Corrupt):
        decode(content)


def test_an_unknown_field_is_refused_and_a_missing_field_gets_its_default():
    import msgspec

    with pytest.raises(Corrupt, match="unexpected keyword argument 'mode'"):
        decode(msgspec.msgpack.encode({"$": "Unload", "model_id": "m", "mode": 1}))
    assert decode(
        msgspec.msgpack.encode({"$": "Loaded", "model_id": "m", "path": "p"})
    ) == rs.Loaded("m", "p", "")
    with pytest.raises(Corrupt, match="Popen"):
        decode(msgspec.msgpack.encode({"$": "Popen", "args": "ls"}))
