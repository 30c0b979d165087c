import contextlib
import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hn

from skyrl_actors.journal.encoding import TABLE, decode, encode, from_json, to_json
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
            assert TABLE.types[cls.__name__] is cls


def test_types_of_existing_journals_can_still_be_decoded():
    """A type may leave this list only with a migration of the journal."""
    assert set(TABLE.types) >= {
        *("CreateModel", "ForwardBackward", "LoadWeights", "OptimStep", "Sample", "SaveExternal"),
        *("SaveForSampler", "SaveWeights", "Unload", "AdamParams", "Columns", "LoraSpec"),
        *("LossCall", "ModelSpec", "PromptTargets", "SamplingParams", "SparseLayout", "Failure"),
        *("Loaded", "LossOutput", "ModelCreated", "SampleOutput", "SamplerSaved", "Saved"),
        *("Sequence", "StepDone", "Unloaded", "PromptAlternatives", "TargetLogprobs"),
        *("SamplerWeights", "TensorEntry", "WeightManifest", "Images"),
    }


def test_the_format_of_existing_journals_has_not_changed():
    begin = (
        b"\x86\xa1$\xafForwardBackward\xa8model_id\xa1m\xa7columns%b\xa1$\xa7Columns"
        b"\xa6tokens\xc7\x11\x01\x07\x00\x92\xa3<i4\x91\x02\x05\x00\x00\x00\x06\x00\x00\x00"
        b"\xa7offsets\xc7\x19\x01\x07\x00\x92\xa3<i8\x91\x02"
        + bytes(8)
        + b"\x02"
        + bytes(7)
        + b"\xa6fields\x81\xa7weights\xc7\x11\x01\x07\x00\x92\xa3<f4\x91\x02\x00\x00\x80?"
        b"\x00\x00\x00\x80\xa6widths\xc0"
    )
    end = (
        b"\xa4loss\x83\xa1$\xa8LossCall\xa4name\xa3ppo\xa6config"
        b"\x82\xa1$\xa0\xa5items\x91\x92\xa1$\xcb?\xe0\x00\x00\x00\x00\x00\x00"
        b"\xacforward_only\xc2\xa6seq_id\x03"
    )
    message = rq.ForwardBackward(
        model_id="m",
        columns=Columns(
            tokens=np.array([5, 6], np.int32),
            offsets=np.array([0, 2]),
            fields={"weights": np.array([1, -0.0], np.float32)},
        ),
        loss=LossCall("ppo", {"$": 0.5}),
        seq_id=3,
    )
    later = b"\xa6routes\xc0\xa6images\xc0"
    newest = begin.replace(b"%b", b"\x88") + later + b"\xa6fronts\xc0" + end
    assert encode(message) == newest and same(decode(newest), message)
    without_fronts = begin.replace(b"%b", b"\x87") + later + end
    assert same(decode(without_fronts), message)
    without_routes = begin.replace(b"%b", b"\x85") + end
    assert same(decode(without_routes), message)
    without_images = begin.replace(b"%b", b"\x86") + b"\xa6routes\xc0" + end
    assert same(decode(without_images), message)


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
