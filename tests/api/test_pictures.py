"""Images in training requests: decoded with the SDK's bodies, counted and refused by name."""

import base64
import hashlib
import io
import zlib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from skyrl_actors.api import codec
from skyrl_actors.api.pictures import PictureReader
from skyrl_actors.config.limits import LimitsConfig
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.image_form import ImageForm
from skyrl_actors.messages.images import Picture
from skyrl_actors.messages.model import LossCall, ModelSpec
from skyrl_actors.messages.precondition import OpPrecondition
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import LossOutput, SampleOutput
from skyrl_actors.messages.weights import SamplerWeights
from tests.api.local import AnsweringBackend, config_for, edge, model_in, resolved
from tests.fakes import changed

FORM = ImageForm(token=150, patch=4, merge=2, least=64, most=4096)
LIMITS = LimitsConfig()


def encoded(width: int = 24, height: int = 16, format: str = "png", seed: int = 0) -> bytes:
    content = io.BytesIO()
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(values).save(content, format)
    return content.getvalue()


def image(content: bytes, format: Any = "png", expected: int | None = 6) -> types.ImageChunk:
    return types.ImageChunk(data=content, format=format, expected_tokens=expected)


def datum(*chunks: Any, length: int) -> types.Datum:
    targets = np.arange(length)
    return types.Datum(
        model_input=types.ModelInput(chunks=list(chunks)),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(targets),
            "weights": types.TensorData.from_numpy(np.ones(length, np.float32)),
        },
    )


def text(*tokens: int) -> types.EncodedTextChunk:
    return types.EncodedTextChunk(tokens=list(tokens))


def as_json(datum: types.Datum) -> dict[str, Any]:
    """Return a datum as SDKs before 0.25 send it."""
    chunks = [
        {"tokens": list(chunk.tokens), "type": "encoded_text"}
        if isinstance(chunk, types.EncodedTextChunk)
        else {
            "data": base64.b64encode(chunk.data).decode(),
            "format": chunk.format,
            "expected_tokens": chunk.expected_tokens,
            "type": "image",
        }
        for chunk in datum.model_input.chunks
        if isinstance(chunk, types.EncodedTextChunk | types.ImageChunk)
    ]
    inputs = {
        name: {"data": tensor.tolist(), "dtype": tensor.dtype, "shape": None}
        for name, tensor in datum.loss_fn_inputs.items()
    }
    return {"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}


def read(wire: str, *data: types.Datum, reader: PictureReader | None = None) -> Columns:
    content = ForwardBackwardInput(data=list(data), loss_fn="cross_entropy")
    request = ForwardBackwardRequest(forward_backward_input=content, model_id="m", seq_id=1)
    reader = reader or PictureReader(FORM, LIMITS)
    if wire == "json":
        body = {
            "model_id": "m",
            "seq_id": 1,
            "forward_backward_input": {
                "data": [as_json(each) for each in data],
                "loss_fn": "cross_entropy",
            },
        }
        return codec.forward_backward_from_json(body, False, reader=reader).columns
    sent = forward_backward_request_to_proto(request).SerializeToString()
    return codec.forward_backward_from_proto(sent, reader=reader).columns


@pytest.mark.parametrize("wire", ["json", "proto"])
def test_an_image_becomes_placeholders_and_its_bytes(wire: str):
    first, second = encoded(), encoded(8, 16, "jpeg", seed=1)
    columns = read(
        wire,
        datum(text(3, 4), image(first), text(5), image(second, "jpeg", 2), text(6), length=12),
        datum(text(7, 8), length=2),
        datum(image(first, expected=None), text(9), length=7),
    )
    hold = [150]
    assert columns.tokens.tolist() == [3, 4, *hold * 6, 5, *hold * 2, 6, 7, 8, *hold * 6, 9]
    found = columns.images
    assert found is not None
    assert found.contents == (first, second)  # equal ones once
    assert found.digests == tuple(hashlib.sha256(one).hexdigest() for one in (first, second))
    assert found.grids.tolist() == [[1, 4, 6], [1, 4, 2]]
    assert found.starts.tolist() == [2, 9, 14] and found.counts.tolist() == [6, 2, 6]
    assert found.which.tolist() == [0, 1, 0]
    assert [len(list(columns.images_of(row))) for row in range(3)] == [2, 0, 1]
    assert read(wire, datum(text(7, 8), length=2)).images is None


def test_the_first_sdks_name_the_tokens_of_an_image_otherwise():
    sent = as_json(datum(text(3), image(encoded()), length=7))
    chunk = sent["model_input"]["chunks"][1]
    for tokens, fits in ((6, True), (5, False)):
        sent["model_input"]["chunks"][1] = {
            **{name: value for name, value in chunk.items() if name != "expected_tokens"},
            "tokens": tokens,
            "width": 48,
            "height": 32,
        }
        given = {"data": [sent], "loss_fn": "cross_entropy"}
        body = {"model_id": "m", "seq_id": 1, "forward_backward_input": given}
        reader = PictureReader(FORM, LimitsConfig())
        with nullcontext() if fits else pytest.raises(InvalidRequest, match="takes 6 tokens"):
            codec.forward_backward_from_json(body, False, reader=reader)


@pytest.mark.parametrize("wire", ["json", "proto"])
@pytest.mark.parametrize(
    ("chunk", "said"),
    [
        (image(encoded(), expected=7), "takes 6 tokens, and expected_tokens is 7"),
        (image(encoded(), "jpeg"), "is not a jpeg image"),
        (image(encoded()[:60]), "is not a png image"),
        (image(b"<svg/>"), "is not a png image"),
        (image(encoded(1, 300), expected=None), "one may be at most 200 times as long"),
        (text(3, 150), "the token id 150 stands for an image"),
    ],
)
def test_what_is_no_image_is_refused_with_its_datum(wire: str, chunk: Any, said: str):
    good = datum(text(7, 8), length=2)
    with pytest.raises(InvalidRequest, match=said) as raised:
        read(wire, good, datum(text(3), chunk, length=7))
    assert str(raised.value).startswith("datum 1")


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ({"images": 1}, r"more than 1 images \(limits\.images\)"),
        ({"image_bytes": 100}, r"bytes; at most 100 are allowed \(limits\.image_bytes\)"),
        ({"image_pixels": 100}, r"24 x 16 pixels; at most 100 .*limits\.image_pixels"),
        ({"request_pixels": 400}, r"more than 400 pixels together \(limits\.request_pixels\)"),
    ],
)
def test_limits_of_images(limit: dict[str, int], said: str):
    reader = PictureReader(FORM, LIMITS.model_copy(update=limit))
    chunks = (image(encoded()), image(encoded(seed=1)))
    with pytest.raises(InvalidRequest, match=said):
        read("proto", datum(*chunks, text(3), length=13), reader=reader)


def palette_without_colours() -> bytes:
    """A PNG that Pillow loads, and cannot convert."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
        )

    head = (8).to_bytes(4, "big") * 2 + bytes((8, 3, 0, 0, 0))
    rows = zlib.compress(bytes(9 * 8))
    parts = (chunk(b"IHDR", head), chunk(b"tRNS", b"\0"), chunk(b"IDAT", rows), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def with_scans(count: int) -> bytes:
    """A JPEG whose last scan is repeated. Each takes as long as the image, and few bytes."""
    content = io.BytesIO()
    Image.new("L", (64, 64), 7).save(content, "JPEG", progressive=True)
    whole = content.getvalue()
    last = whole[whole.rindex(b"\xff\xda") : -2]
    return whole[:-2] + last * count + whole[-2:]


@pytest.mark.parametrize(
    ("content", "format", "said"),
    [
        (palette_without_colours(), "png", "is not a png image"),
        (with_scans(200), "jpeg", "has more than 100 scans"),
    ],
)
def test_files_that_are_bad_in_unusual_ways_are_refused(content: bytes, format: str, said: str):
    good = datum(text(7, 8), length=2)
    with pytest.raises(InvalidRequest, match=said) as raised:
        read("proto", good, datum(image(content, format, None), text(3), length=7))
    assert str(raised.value).startswith("datum 1: image 0")


def test_nested_tokens_and_unknown_chunks_are_refused_with_their_datum():
    body: dict[str, Any] = {"model_id": "m", "forward_backward_input": {"loss_fn": "ppo"}}
    for chunk, said in (
        ({"tokens": [[1, 2], [3, 4]]}, "datum 0: tokens must be a list of whole numbers"),
        ({"type": "image", "format": "png"}, "datum 0 has a chunk of kind image; only text"),
        ({"type": "image_asset_pointer", "location": "/etc/passwd"}, "no folder of images"),
    ):
        row = {"model_input": {"chunks": [chunk, {"tokens": [5]}]}, "loss_fn_inputs": {}}
        body["forward_backward_input"]["data"] = [row]
        with pytest.raises(InvalidRequest, match=said):
            codec.forward_backward_from_json(body, False, reader=PictureReader(FORM, LIMITS))


@pytest.mark.parametrize(
    ("side", "said"),
    [(8_000, "8000 x 8000 pixels; at most 33554432"), (32_000, "decompression bomb")],
)
def test_a_bomb_is_refused_before_it_is_decoded(side: int, said: str):
    """A small PNG whose head names a large size."""
    content = bytearray(encoded())
    content[16:24] = side.to_bytes(4, "big") * 2
    crc = zlib.crc32(content[12:29])
    content[29:33] = crc.to_bytes(4, "big")
    with pytest.raises(InvalidRequest, match=said):
        read("proto", datum(image(bytes(content)), text(3), length=7))


def test_a_base_without_a_tower_takes_no_images():
    reader = PictureReader(None, LIMITS)
    with pytest.raises(InvalidRequest, match=r"datum 0: image 0: the base model takes no images"):
        read("proto", datum(image(encoded()), text(3), length=7), reader=reader)
    assert read("proto", datum(text(150, 3), length=2), reader=reader).images is None


def test_an_image_that_is_too_thin_once_resized_is_refused():
    """Engines check the sides of the resized image again."""
    reader = PictureReader(replace(FORM, most=10**6), LIMITS)
    assert reader.form and reader.form.grid(2192, 11) == (1, 2, 548)
    with pytest.raises(InvalidRequest, match="after it was resized, it is too long"):
        reader.read("image 0", 0, encoded(2192, 11), "png", None)


def test_an_equal_image_is_decoded_once(monkeypatch: pytest.MonkeyPatch):
    opened = list[bytes]()
    own = Image.open

    def counted(file: io.BytesIO, *arguments: Any, **named: Any) -> Any:
        opened.append(file.getvalue())
        return own(file, *arguments, **named)

    monkeypatch.setattr(Image, "open", counted)
    read("proto", datum(image(encoded()), image(encoded()), text(3), length=13))
    assert opened == [encoded()]


@given(st.integers(1, 700), st.integers(1, 700), st.sampled_from([(4, 64), (14, 3136)]))
def test_the_formula_is_that_of_transformers(width: int, height: int, sizes: tuple[int, int]):
    patch, least = sizes
    form = replace(FORM, patch=patch, least=least, most=40 * least)
    size = {"shortest_edge": least, "longest_edge": 40 * least}
    processor = Qwen2VLImageProcessorPil(patch_size=patch, merge_size=2, size=size)
    picture = Image.new("RGB", (width, height))
    try:
        found = processor(images=[picture], return_tensors="np")["image_grid_thw"][0].tolist()
    except ValueError:
        with pytest.raises(ValueError, match="times as long"):
            form.grid(width, height)
        return
    assert list(form.grid(width, height)) == found


class Seeing(AnsweringBackend):
    """A backend whose base model takes images. It keeps the batches that it gets."""

    def __init__(self, folder: str):
        super().__init__(folder)
        self.batches: list[Columns] = []
        self.prompts: list[tuple[tuple[int, ...], tuple[Picture, ...]]] = []

    async def start(self, epoch: int) -> Any:
        return changed(await super().start(epoch), images=FORM)

    async def forward_backward(
        self,
        spec: ModelSpec,
        precondition: OpPrecondition,
        columns: Columns,
        loss: LossCall | None,
        forward_only: bool,
        weight: float = 1.0,
    ) -> LossOutput:
        self.batches.append(columns)
        return await super().forward_backward(spec, precondition, columns, loss, forward_only)

    async def sample(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        weights: SamplerWeights,
        pictures: tuple[Picture, ...] = (),
    ) -> SampleOutput:
        self.prompts.append((prompt, pictures))
        return await super().sample(request_id, prompt, params, weights, pictures)


async def test_an_image_reaches_the_backend_through_the_journal(tmp_path: Path):
    backend, content = Seeing(str(tmp_path)), encoded()
    async with edge(config_for(tmp_path), backend) as http:
        _, model = await model_in(http)

        def body(expected: int) -> dict[str, Any]:
            row = as_json(datum(text(3), image(content, expected=expected), text(4), length=8))
            return {
                "model_id": model,
                "forward_backward_input": {"data": [row], "loss_fn": "cross_entropy"},
            }

        found = await resolved(http, "/forward_backward", **body(6))
        assert len(found["loss_fn_outputs"][0]["logprobs"]["data"]) == 8
        (batch,) = backend.batches
        assert batch.images is not None and batch.images.contents == (content,)
        wrong = await http.post("/forward_backward", json=body(5))
        assert wrong.status_code == 422
        assert "datum 0: image 0 takes 6 tokens, and expected_tokens is 5" in wrong.text
    assert len(backend.batches) == 1


def test_a_png_may_have_the_bytes_of_a_scan():
    """They are ordinary data in it."""
    content = io.BytesIO()
    values = np.zeros((4, 4, 3), np.uint8)
    notes = PngInfo()
    notes.add_text("note", "\xff\xda" * 200)
    Image.fromarray(values).save(content, "png", pnginfo=notes)
    assert content.getvalue().count(b"\xff\xda") > 100
    PictureReader(FORM, LIMITS).read("x", 0, content.getvalue(), "png", None)
