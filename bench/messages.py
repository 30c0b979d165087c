"""The time to encode and decode one message of RPC, beside pickle with its arrays out of band.

    python -m bench.messages

Each figure is the fastest of 300 rounds in microseconds, for one process on one core.
"""

import pickle
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bench.harness import emit
from skyrl_actors.controller.calls import ControllerCalls
from skyrl_actors.messages.columns import Columns, offsets_of
from skyrl_actors.messages.example import TARGETS, WEIGHTS
from skyrl_actors.messages.model import LossCall
from skyrl_actors.messages.requests import ForwardBackward, Sample, SamplingParams
from skyrl_actors.messages.results import SampleOutput, Sequence
from skyrl_actors.transport.encoding import BESIDE_BYTES, CallEncoding
from skyrl_actors.transport.frames import HEAD, Frame

ROUNDS, SMALL_REPEATS, LARGE_REPEATS = 300, 30, 10
MIB = 2**20
ENCODING = CallEncoding(ControllerCalls)


def sample() -> Sample:
    params = SamplingParams(max_tokens=64, seed=7)
    return Sample(sampler_id="s:sample:0", prompt=tuple(range(100, 164)), params=params, seq_id=3)


def forward_backward() -> ForwardBackward:
    tokens = np.ones(MIB // 12, np.int32)  # tokens, targets and weights are 1 MiB together
    fields: dict[str, Any] = {TARGETS: tokens.copy(), WEIGHTS: np.ones(len(tokens), np.float32)}
    columns = Columns(tokens=tokens, offsets=offsets_of([len(tokens)]), fields=fields)
    return ForwardBackward(model_id="m", columns=columns, loss=LossCall("cross_entropy", {}))


def output() -> SampleOutput:
    tokens, logprobs = np.arange(64, dtype=np.int32), np.ones(64, np.float32)
    one = Sequence(tokens=tokens, logprobs=logprobs, stop_reason="stop")
    return SampleOutput(sequences=(one,), version="m@3")


def pickled(content: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    beside: list[pickle.PickleBuffer] = []

    def stays_inside(buffer: pickle.PickleBuffer) -> bool:
        is_small = buffer.raw().nbytes < BESIDE_BYTES
        if not is_small:
            beside.append(buffer)
        return is_small

    return pickle.dumps(content, protocol=5, buffer_callback=stays_inside), beside


def received(frame: Frame) -> tuple[memoryview, int]:
    content = bytearray(b"".join(frame))
    return memoryview(content)[HEAD.size :], HEAD.unpack_from(content)[1]


def fastest_us(work: Callable[[], Any], repeats: int) -> float:
    found = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        found.append((time.perf_counter() - began) / repeats)
    return round(1e6 * min(found), 1)


def compared(
    content: Any,
    encode: Callable[[], Frame],
    decode: Callable[[memoryview, int], Any],
    repeats: int = SMALL_REPEATS,
) -> dict[str, float]:
    old, beside = pickled(content)
    return {
        "pickle_encode_us": fastest_us(partial(pickled, content), repeats),
        "pickle_decode_us": fastest_us(partial(pickle.loads, old, buffers=beside), repeats),
        "encode_us": fastest_us(encode, repeats),
        "decode_us": fastest_us(partial(decode, *received(encode())), repeats),
    }


def of_call(method: str, *arguments: Any, repeats: int = SMALL_REPEATS) -> dict[str, float]:
    encode = partial(ENCODING.call, 1, method, arguments, {})
    return compared((1, method, arguments, {}), encode, ENCODING.decoded_call, repeats)


def of_answer(method: str, result: Any) -> dict[str, float]:
    encode = partial(ENCODING.answer, 1, method, result)
    return compared((1, True, result), encode, ENCODING.decoded_answer)


def main() -> None:
    found = {
        "heartbeat": of_call("heartbeat", "s0123456789abcdef"),
        "sample of 64 tokens": of_call("submit", sample(), "r"),
        "forward_backward of 1 MiB": of_call(
            "submit", forward_backward(), "r", repeats=LARGE_REPEATS
        ),
        "answer of 64 tokens": of_answer("retrieve", output()),
    }
    emit("messages", found)


if __name__ == "__main__":
    main()
