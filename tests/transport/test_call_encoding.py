"""The closed set of types on the wire: what arrives unchanged, and what is refused."""

import contextlib
import dataclasses
import hashlib
import inspect
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hn

from skyrl_actors.colocation.phases import Phase
from skyrl_actors.controller.calls import ControllerCalls
from skyrl_actors.engines.interface import EngineCalls
from skyrl_actors.messages import errors
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages.errors import InternalError, InvalidRequest, NotFound, SkyrlActorsError
from skyrl_actors.messages.tagged import MOST_DEPTH, types_in
from skyrl_actors.remote import ActorDied, Overdue
from skyrl_actors.transport.encoding import BESIDE_BYTES, ERRORS, CallEncoding
from skyrl_actors.transport.frames import HEAD, Frame, Unreadable
from skyrl_actors.transport.handshake import PROTOCOL_VERSION
from skyrl_actors.transport.protocols import Deferred, methods_of, table_of

METHODS = [
    (protocol, name)
    for protocol in (ControllerCalls, EngineCalls)
    for name in sorted(methods_of(protocol))
]
CALLS = CallEncoding(ControllerCalls)
# After a change of a message type: raise PROTOCOL_VERSION, and put the new digest here.
DIGESTS = {
    1: "776ee14057f15d2c",
    2: "9f1f2116286375ec",
    3: "00f90e698e37d929",
    4: "a7ef1395138fe62b",
    5: "f101e21a4db373bd",
    6: "02772113366795ab",
    7: "e199380fec2193fa",
    8: "46f98ee216708465",
    9: "f81666e7f65b3114",
    10: "e138efa045cd683a",
    11: "13c86c0d2dae58ab",
    12: "7b08b522f21068e3",
    13: "1779e79d3ee43bb1",
    14: "56bbed0db5f69cfe",
    15: "602ec34852d7e9ad",
}


def received(frame: Frame) -> tuple[memoryview, int]:
    """Return the body and the number of arrays, as the other process reads them."""
    content = b"".join(frame)
    size, arrays = HEAD.unpack_from(content)
    body = np.empty(size, np.uint8).data
    body[:] = content[HEAD.size :]
    return body, arrays


def same(a: Any, b: Any) -> bool:
    """Return whether types, values and the bits of numbers are equal."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return np.float64(a).tobytes() == np.float64(b).tobytes()
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


# every method


SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=8) | st.sampled_from(["$", "", "list"]),
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(),
    bool: st.booleans(),
    bytes: st.binary(max_size=8),
    type(None): st.none(),
}
LEAVES = st.one_of(SIMPLE[str], SIMPLE[int], SIMPLE[float], st.booleans(), st.none())
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(SIMPLE[str], inner, max_size=3)
    ),
    max_leaves=6,
)


def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    """Return values of an annotation. Fails for a type that must not be on the wire."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in SIMPLE:
        return SIMPLE[annotation]
    if annotation is Any:
        return JSON
    if origin is Literal:
        return st.sampled_from(inner)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values_of, inner))
    if origin is tuple and inner[1:] == (...,):
        return st.lists(values_of(inner[0]), max_size=4).map(tuple)
    if origin is tuple:
        if inner == (Any,):
            return st.lists(JSON, max_size=2).map(tuple)
        return st.tuples(*map(values_of, inner))
    if origin is list:
        return st.lists(values_of(inner[0]), max_size=3)
    if origin in (dict, Mapping):
        return st.dictionaries(values_of(inner[0]), values_of(inner[1]), max_size=3)
    if origin is np.ndarray:
        kind = typing.get_args(inner[1])[0]
        return hn.arrays(
            st.sampled_from([np.int32, np.float32]) if kind is np.generic else kind,
            hn.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=4),
        )
    assert dataclasses.is_dataclass(annotation), f"{annotation} must not be on the wire"
    cls = typing.cast("type[Any]", annotation)
    hints = typing.get_type_hints(cls)
    found = {field.name: values_of(hints[field.name]) for field in dataclasses.fields(cls)}
    return st.builds(cls, **found)


def annotations_of(protocol: type, name: str) -> tuple[list[Any], Any]:
    """Return the annotations of a method's arguments, and of its result."""
    hints = typing.get_type_hints(getattr(protocol, name))
    result = hints.pop("return")
    is_deferred = typing.get_origin(result) is Deferred
    return list(hints.values()), typing.get_args(result)[0] if is_deferred else result


@pytest.mark.parametrize(("protocol", "name"), METHODS)
def test_arguments_and_results_of_every_method_arrive_unchanged(protocol: type, name: str):
    encoding, (arguments, result) = CallEncoding(protocol), annotations_of(protocol, name)

    @settings(max_examples=25)
    @given(st.tuples(*map(values_of, arguments)), values_of(result), SIMPLE[int])
    def check(given_: tuple[Any, ...], answer: Any, number: int) -> None:
        got = encoding.decoded_call(*received(encoding.call(number, name, given_, {})))
        assert same(got, (number, name, given_, {}))
        got = encoding.decoded_call(*received(encoding.call(number, name, (), {"x": given_})))
        assert same(got, (number, name, (), {"x": given_}))
        got = encoding.decoded_answer(*received(encoding.answer(number, name, answer)))
        assert same(got, (number, True, answer))

    check()


def test_the_tables_have_every_type_that_the_methods_name():
    def walk(annotation: Any) -> set[type]:
        found = set[type]()
        if dataclasses.is_dataclass(annotation) and annotation is not Deferred:
            cls = typing.cast("type[Any]", annotation)
            hints = typing.get_type_hints(cls)
            found = {cls}.union(*(walk(hints[f.name]) for f in dataclasses.fields(cls)))
        return found.union(*map(walk, typing.get_args(annotation)))

    for protocol, name in METHODS:
        arguments, result = annotations_of(protocol, name)
        for cls in set[type]().union(*map(walk, [*arguments, result])):
            assert table_of(protocol).types[cls.__name__] is cls


def test_a_type_that_cannot_be_sent_is_refused_before_any_call():
    class Wrong(typing.Protocol):
        async def ask(self, names: set[str]) -> None: ...

    for annotation in (set[str], object, complex, type, dict[str, memoryview]):
        with pytest.raises(TypeError, match="cannot be encoded"):
            types_in(annotation)
    with pytest.raises(TypeError, match=r"set\[str\] cannot be encoded"):
        CallEncoding(Wrong)


def test_a_change_of_a_message_type_needs_a_new_protocol_version():
    names = [
        (name, list(inspect.signature(getattr(protocol, name)).parameters))
        for protocol, name in METHODS
    ]
    shapes = sorted(
        (cls.__name__, [field.name for field in dataclasses.fields(cls)])
        for protocol in (ControllerCalls, EngineCalls)
        for cls in table_of(protocol).types.values()
    )
    digest = hashlib.sha256(repr((names, shapes)).encode()).hexdigest()[:16]
    assert DIGESTS[PROTOCOL_VERSION] == digest, "see DIGESTS"


# values


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, np.int32, np.uint8, np.bool_])
@pytest.mark.parametrize("size", [0, 1, 7, BESIDE_BYTES // 8, BESIDE_BYTES, 300_000])
def test_arrays_arrive_bitwise(kind: type, size: int):
    values = np.random.default_rng(0).integers(0, 2, size).astype(kind)
    if size and issubclass(kind, np.floating):
        values[:2] = [np.nan, -0.0][:size]
    sent = {"flat": values, "wide": values.reshape(1, -1), "back": values[::-1], "none": values[:0]}
    got = CALLS.decoded_answer(*received(CALLS.answer(1, "status", sent)))[2]
    assert same(got, sent)
    for array in got.values():
        assert array.flags.writeable and array.flags.aligned and array.flags.c_contiguous


def test_numbers_of_numpy_and_texts_of_enums_arrive_as_plain_values():
    sent = {Phase.TRAIN: np.float32(0.5), "a": np.int64(3), "b": np.bool_(True), "c": Phase.STEP}
    got = CALLS.decoded_answer(*received(CALLS.answer(1, "status", sent)))[2]
    assert same(got, {"TRAIN": 0.5, "a": 3, "b": True, "c": "STEP"})


@pytest.mark.parametrize(
    ("odd", "arrives"),
    [
        (np.int64(3), 3),
        (np.uint8(3), 3),  # numpy refuses to add it to a larger number
        (np.float32(0.5), 0.5),
        (True, True),
        (0.25, 0.25),
        (None, None),
        ("x", "x"),
        (Phase.STEP, "STEP"),
        ((1, 2), (1, 2)),
        ({"a": (1,)}, {"a": (1,)}),
    ],
)
def test_every_item_of_a_long_list_of_numbers_is_looked_at(odd: Any, arrives: Any):
    for place in (1, 50, 99):
        sent = [*range(300, 300 + place), odd, *range(place, 100)]
        got = CALLS.decoded_answer(*received(CALLS.answer(1, "status", {"a": sent})))[2]
        assert same(got["a"], [*range(300, 300 + place), arrives, *range(place, 100)])


def test_an_array_in_a_long_list_of_numbers_arrives():
    sent = {"a": [*range(40), np.arange(3, dtype=np.int32)]}
    got = CALLS.decoded_answer(*received(CALLS.answer(1, "status", sent)))[2]
    assert got["a"][:40] == [*range(40)] and got["a"][40].tolist() == [0, 1, 2]


def test_a_dict_may_have_the_key_of_the_type_tag():
    sent = {"$": "Popen", "": {"$": "list", "items": [1]}, "x": [{"$": None}]}
    got = CALLS.decoded_answer(*received(CALLS.answer(1, "status", sent)))[2]
    assert same(got, sent)


# refusals


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


class Unlisted:
    pass


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        ({1, 2}, InternalError, "heartbeat cannot be called: a value of type builtins.set"),
        (Unlisted(), InternalError, r"heartbeat cannot be called: .*\.Unlisted cannot be encoded"),
        (lambda: 1, InternalError, "a value of type builtins.function"),
        (Overdue, InternalError, "a value of type builtins.type"),
        (rq, InternalError, "a value of type builtins.module"),
        (np.array([Unlisted()]), InternalError, "an array of object cannot be encoded"),
        (np.array(["x"]), InternalError, "an array of <U1 cannot be encoded"),
        ({(1, 2): 3}, InternalError, "a value of type builtins.tuple"),
        (2**64, InvalidRequest, "heartbeat: a value cannot be sent: .*at most 64 bits"),
        ("\ud800", InvalidRequest, "heartbeat: a value cannot be sent: .*valid Unicode"),
        (nested(MOST_DEPTH), InvalidRequest, "nested more than 32 deep"),
    ],
)
def test_a_value_that_cannot_be_sent_is_refused_with_its_method_and_type(
    value: Any, error: type[SkyrlActorsError], text: str
):
    with pytest.raises(error, match=text):
        CALLS.call(1, "heartbeat", (value,), {})
    number, is_result, found = CALLS.decoded_answer(*received(CALLS.answer(7, "status", value)))
    assert (number, is_result) == (7, False) and type(found) is InternalError
    assert "the answer of status cannot be sent" in str(found)


def call_with(argument: Any) -> memoryview:
    return memoryview(msgspec.msgpack.encode((1, "heartbeat", (argument,), {})))


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ({"$": "Popen", "args": "ls"}, "unknown type 'Popen'"),
        ({"$": "Columns"}, "missing 3 required"),
        ({"$": "Waiting", "mode": 1}, "unexpected keyword argument 'mode'"),
        ({"$": "WorkerSpec"}, "unknown type"),
        ({"$": ["Waiting"]}, "unhashable"),
        ({"$": {"$": "Waiting"}}, "unhashable"),
        ({"$": "", "items": [1]}, ""),
        ({"$": "list"}, "items"),
        (nested(MOST_DEPTH + 1), "nested more than 32 deep"),
        (msgspec.msgpack.Ext(2, bytes(8)), "unknown extension 2"),
        (msgspec.msgpack.Ext(9, b"x"), "unknown extension 9"),
        (msgspec.msgpack.Ext(1, b"\x06\x00\x92\xa2|O\x91\x01" + bytes(8)), "not allowed"),
        (msgspec.msgpack.Ext(1, b"\x07\x00\x92\xa3<f4\x91\x05" + bytes(8)), "reshape"),
    ],
)
def test_a_message_of_other_types_or_fields_is_unreadable(argument: Any, text: str):
    with pytest.raises(Unreadable, match=f"a call cannot be decoded: .*{text}"):
        CALLS.decoded_call(call_with(argument), 0)


def test_a_message_that_is_nested_beyond_every_limit_is_unreadable():
    for depth in (1_000, 1_000_000):
        with pytest.raises(Unreadable):
            CALLS.decoded_call(memoryview(b"\x91" * depth + b"\xc0"), 0)


def test_a_frame_with_wrong_sizes_is_unreadable():
    body, arrays = received(CALLS.answer(1, "status", np.ones(BESIDE_BYTES, np.float32)))
    for content, count in ((body[:-1], arrays), (body, 2), (body, 2**32 - 1), (body[:9], 1)):
        with pytest.raises(Unreadable):
            CALLS.decoded_answer(content, count)


@given(st.binary(max_size=200), st.integers(0, 3))
def test_other_bytes_are_unreadable(content: bytes, arrays: int):
    for decode in (CALLS.decoded_call, CALLS.decoded_answer):
        with contextlib.suppress(Unreadable):
            decode(memoryview(content), arrays)


# errors


def arrived(error: BaseException) -> BaseException:
    number, is_result, found = CALLS.decoded_answer(*received(CALLS.error(3, "status", error)))
    assert (number, is_result) == (3, False)
    return found


@pytest.mark.parametrize("cls", ERRORS.values())
def test_every_error_of_the_package_arrives_as_its_class(cls: type[SkyrlActorsError]):
    found = arrived(cls("what was wrong"))
    assert type(found) is cls and found.args == ("what was wrong",)


def test_all_errors_of_messages_are_in_the_table():
    for cls in vars(errors).values():
        if isinstance(cls, type) and issubclass(cls, Exception):
            assert ERRORS[cls.__name__] is cls
    assert ERRORS["ActorDied"] is ActorDied


def test_an_error_keeps_its_declared_attributes():
    error = Overdue("no answer from a and b")
    error.missing = ("a", "b")
    found = arrived(error)
    assert isinstance(found, Overdue) and found.missing == ("a", "b")
    refused = NotFound("gone")
    refused.status = 410
    assert typing.cast("NotFound", arrived(refused)).status == 410


def test_other_errors_arrive_as_their_base_class_or_as_internal_errors():
    class Missing(NotFound):
        pass

    error = Missing("nobody")
    error.add_note("not sent")
    assert type(arrived(error)) is NotFound and str(arrived(error)) == "nobody"
    found = arrived(ZeroDivisionError("ours"))
    assert type(found) is InternalError and str(found) == "status: ZeroDivisionError: ours"
    assert arrived(NotFound("\ud800")).args == ("\\ud800",)
    assert "Unlisted" in str(arrived(NotFound("one of", Unlisted)))


def test_an_answer_with_an_unknown_error_or_attribute_is_unreadable():
    for answer in (
        (1, False, ("OSError", ("x",), {})),
        (1, False, ("NotFound", ("x",), {"args": ("y",)})),
        (1, False, ("NotFound",)),
        ([1], True, None),
    ):
        with pytest.raises(Unreadable):
            CALLS.decoded_answer(memoryview(msgspec.msgpack.encode(answer)), 0)
