"""Images of prompts and training rows reach the model, at their places.

Skipped where the base model takes no images. Only the server knows how many tokens an image has:
`compute_logprobs` tells it, as it has an entry for each.
"""

import struct
import zlib
from typing import Any

import numpy as np
from tinker import types

from tinker_conformance.checks import check, expect
from tinker_conformance.server import Server, Values, loss_in, rows, tensor

SIZE = 112  # pixels a side


def png(shade: int, size: int = SIZE) -> bytes:
    """Return a picture with a gradient, so that no two shades are alike after normalization."""
    lines = b"".join(b"\0" + bytes([shade, y % 256, 40] * size) for y in range(size))
    head = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_part(name, data) for name, data in parts)


def _part(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _image(data: bytes) -> Any:
    return types.ImageChunk(data=data, format="png")


def _text(row: list[int]) -> Any:
    return types.EncodedTextChunk(tokens=row)


def _scored(server: Server, sampler: Any, *chunks: Any) -> Values:
    """Return the logprobs of all tokens but the first, NaN where the server has none."""
    found = server.got(sampler.compute_logprobs(types.ModelInput(chunks=list(chunks))))
    return np.asarray([np.nan if x is None else x for x in found[1:]], np.float64)


def _sampler(server: Server) -> tuple[Any, Any]:
    """Return a model and its sampler. Raises Skipped if the base model takes no images."""
    model = server.model()
    sampler = server.got(model.save_weights_and_get_sampling_client())
    prompt = types.ModelInput(chunks=[_image(png(10)), _text(rows(0, 1)[0])])
    found = server.offered(lambda: sampler.compute_logprobs(prompt), "a prompt with an image")
    expect(len(found) > 13, f"{len(found)} logprobs of an image and 13 tokens")
    return model, sampler


@check("images", "Text after an image depends on what the image shows, and only on that")
def images_are_seen(server: Server) -> None:
    _, sampler = _sampler(server)
    row = rows(0, 1)[0]
    dark, light, again = (
        _scored(server, sampler, _image(png(shade)), _text(row))[-len(row) :]
        for shade in (10, 240, 10)
    )
    server.same(again, dark, "the same image has other logprobs the second time", 1e-3)
    expect(float(np.abs(light - dark).max()) > 1e-4, "two different images are read alike")


@check("images", "Text before an image does not depend on it")
def image_positions(server: Server) -> None:
    _, sampler = _sampler(server)
    row = rows(0, 1)[0]
    before = _scored(server, sampler, _text(row))
    beside = _scored(server, sampler, _text(row), _image(png(10)))
    expect(len(beside) > len(before), "an image has no tokens in compute_logprobs")
    server.same(beside[: len(before)], before, "text before an image changes with it")


@check("images", "Training rows with images have the loss that the sampler's logprobs give")
def images_train(server: Server) -> None:
    alpha = server.alpha
    model, sampler = _sampler(server)
    row = rows(0, 1)[0]
    chunks = [_image(png(10)), _text(row)]
    sampled = _scored(server, sampler, *chunks)
    before = len(sampled) + 1 - len(row)  # tokens of the image
    targets = [*[0] * (before - 1), *row, 20]
    weights = [*[0.0] * (before - 1), *[1.0] * len(row), 0.0]
    inputs = {"target_tokens": tensor(targets, "int64"), "weights": tensor(weights)}
    datum = types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs)
    found = loss_in(server.got(model.forward_backward([datum], "cross_entropy")))
    wanted = -float(sampled[-len(row) :].sum())
    expect(
        abs(found - wanted) <= server.tolerance * abs(wanted),
        f"loss:sum is {found:.5g}, and the sampler's logprobs give {wanted:.5g}",
    )
    server.plain_step(model, alpha)
    later = server.got(model.save_weights_and_get_sampling_client())
    moved = float(np.abs(_scored(server, later, *chunks) - sampled)[-len(row) :].mean())
    expect(moved > 1e-5, "a step on a row with an image moves nothing")


@check("images", "Bytes that are no image are refused, and the model goes on")
def broken_images(server: Server) -> None:
    _, sampler = _sampler(server)
    row = rows(0, 1)[0]
    for content, what in (
        (b"no image", "an image of 8 bytes of text"),
        (png(10)[:60], "a cut image"),
    ):
        prompt = types.ModelInput(chunks=[_image(content), _text(row)])
        server.refused(lambda prompt=prompt: sampler.compute_logprobs(prompt), what)
    expect(bool(np.isfinite(_scored(server, sampler, _text(row))).all()), "text fails after it")
