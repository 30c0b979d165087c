"""Images that clients name: only those of the configured folder, and as if they were sent."""

import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from skyrl_actors.api import codec, pictures
from skyrl_actors.api.image_folder import image_at
from skyrl_actors.api.pictures import PictureReader
from skyrl_actors.config.http import HttpConfig
from skyrl_actors.config.limits import LimitsConfig
from skyrl_actors.messages.errors import InvalidRequest
from tests.api.local import config_for, edge, resolved
from tests.api.test_pictures import FORM, LIMITS, encoded
from tests.api.test_prompts_with_images import COUNT, backend, prompt, text

__all__ = ["backend"]  # a fixture


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of images, beside files that no client may read."""
    made = tmp_path / "images"
    (made / "part").mkdir(parents=True)
    (made / "part" / "a-1.png").write_bytes(encoded())
    (made / ".hidden").write_bytes(encoded())
    (tmp_path / "secret").write_text("secret")
    (made / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(made / "pipe")
    return made


def pointer(location: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_asset_pointer", "format": "png", "location": location, **more}


def test_an_image_of_the_folder_is_read(folder: Path):
    assert image_at(folder, "x", "part/a-1.png", 10**6) == encoded()
    assert len(image_at(folder, "x", "part/a-1.png", 50)) == 51  # refused later for its size


@pytest.mark.parametrize(
    "location",
    [
        *("../secret", "part/../../secret", "/etc/passwd", "part//a-1.png", "link", "pipe"),
        *(".hidden", "", "part", "part/", "a\0.png", "http://host/a.png", "file:///etc/passwd"),
        *("nothing.png", "~", "x" * 600, 7, None, "part\\a-1.png", "part/a-1.png\n"),
    ],
)
def test_nothing_else_is_read(folder: Path, location: Any):
    with pytest.raises(InvalidRequest, match=r"^datum 0: image 0"):
        image_at(folder, "datum 0: image 0", location, 10**6)


def test_without_a_folder_images_are_not_named():
    with pytest.raises(InvalidRequest, match=r"no folder of images \(http.images\); send the"):
        image_at(None, "datum 0: image 0", "a.png", 10**6)


def test_a_folder_that_does_not_exist_is_refused_in_the_config(tmp_path: Path):
    with pytest.raises(ValidationError, match="is no folder; make it"):
        HttpConfig(images=tmp_path / "missing")


@pytest.mark.parametrize("typed", [True, False])
def test_a_datum_may_name_an_image(folder: Path, typed: bool):
    chunk = pointer("part/a-1.png", expected_tokens=COUNT)
    if not typed:  # as SDKs up to 0.16 send it
        del chunk["type"]
    length = COUNT + 1
    inputs = {"target_tokens": {"data": [0] * length, "dtype": "int64", "shape": [length]}}
    inputs["weights"] = {"data": [1.0] * length, "dtype": "float32", "shape": [length]}
    row = {"model_input": {"chunks": [chunk, text(3)]}, "loss_fn_inputs": inputs}
    given = {"data": [row], "loss_fn": "cross_entropy"}
    body = {"model_id": "m", "seq_id": 1, "forward_backward_input": given}
    reader = PictureReader(FORM, LIMITS, folder)
    found = codec.forward_backward_from_json(body, False, reader=reader).columns
    assert found.images is not None and found.images.contents == (encoded(),)
    small = PictureReader(FORM, LimitsConfig(image_bytes=50), folder)
    with pytest.raises(InvalidRequest, match=r"datum 0: image 0 has 51 bytes; at most 50"):
        codec.forward_backward_from_json(body, False, reader=small)
    chunk["expected_tokens"] = COUNT + 1
    with pytest.raises(InvalidRequest, match=f"takes {COUNT} tokens, and expected_tokens is"):
        codec.forward_backward_from_json(body, False, reader=PictureReader(FORM, LIMITS, folder))


async def test_a_prompt_may_name_an_image(tmp_path: Path, folder: Path, backend: Any):
    config = config_for(tmp_path, http=HttpConfig(images=folder))
    async with edge(config, backend) as http:
        await resolved(http, "/asample", **prompt(text(3), pointer("part/a-1.png"), text(4)))
        ((tokens, (picture,)),) = backend.prompts
        assert tokens == (3, *[FORM.token] * COUNT, 4) and picture.content == encoded()
        refused = await http.post("/asample", json=prompt(pointer("../secret")))
        assert refused.status_code == 422 and "is no path of an image" in refused.text
        assert "secret" not in refused.text.replace("../secret", "")


def test_an_image_that_many_pointers_name_is_read_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    read = list[str]()

    def counted(*given: Any) -> bytes:
        read.append(given[2])
        return image_at(*given)

    monkeypatch.setattr(pictures, "image_at", counted)
    reader = PictureReader(FORM, LIMITS, folder)
    row = pictures.Row("datum 0", reader)
    for _ in range(5):
        row.add_pointer("part/a-1.png", "png", None)
    _, found = row.prompt()
    assert read == ["part/a-1.png"] and len({id(one.content) for one in found}) == 1
    (folder / "b.png").write_bytes(encoded(seed=2))
    small = LIMITS.model_copy(update={"body_bytes": len(encoded()) + 10})
    row = pictures.Row("datum 0", PictureReader(FORM, small, folder))
    row.add_pointer("part/a-1.png", "png", None)
    with pytest.raises(InvalidRequest, match=r"bytes together \(limits\.body_bytes\); send fewer"):
        row.add_pointer("b.png", "png", None)
    with pytest.raises(InvalidRequest, match="takes no images"):
        pictures.Row("datum 0", PictureReader(None, LIMITS, folder)).add_pointer("x", "png", None)
