"""Images in prompts: of /asample and of chat completions, checked before anything is queued."""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from skyrl_actors.config.limits import LimitsConfig
from tests.api.local import MODEL, AnsweringBackend, config_for, edge, posted, resolved
from tests.api.test_pictures import FORM, Seeing, encoded

URL = "http://localhost/v1/chat/completions"
COUNT = 6  # tokens of an image
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }} {% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}t150 {% else %}{{ part.text }} "
    "{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.fixture
def backend(tmp_path: Path) -> Seeing:
    words = {f"t{token}": token for token in range(320)}
    tokenizer: Any = Tokenizer(models.WordLevel(words, "t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return Seeing(str(tmp_path))


def chunk(content: bytes, **more: Any) -> dict[str, Any]:
    data = base64.b64encode(content).decode()
    return {"type": "image", "format": "png", "data": data, **more}


def text(*tokens: int) -> dict[str, Any]:
    return {"type": "encoded_text", "tokens": list(tokens)}


def prompt(*chunks: dict[str, Any], **more: Any) -> dict[str, Any]:
    params = {"max_tokens": 2}
    return {
        "base_model": MODEL,
        "prompt": {"chunks": list(chunks)},
        "sampling_params": params,
        **more,
    }


def data_url(content: bytes, format: str = "png") -> dict[str, Any]:
    encoded_bytes = base64.b64encode(content).decode()
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/{format};base64,{encoded_bytes}"},
    }


def chat(*content: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "max_tokens": 2,
        "messages": [{"role": "user", "content": list(content)}],
    }


async def test_a_prompt_has_placeholders_and_the_images_of_its_chunks(
    tmp_path: Path, backend: Seeing
):
    content = encoded()
    async with edge(config_for(tmp_path), backend) as http:
        asked = prompt(
            text(3, 4), chunk(content, expected_tokens=COUNT), text(5), chunk(content, type="image")
        )
        found = await resolved(http, "/asample", **asked, prompt_logprobs=True)
        assert len(found["prompt_logprobs"]) == 2 + COUNT + 1 + COUNT
        ((tokens, pictures),) = backend.prompts
        placeholders = (FORM.token,) * COUNT
        assert tokens == (3, 4, *placeholders, 5, *placeholders)
        assert [one.place for one in pictures] == [2, 9]
        assert {one.digest for one in pictures} == {hashlib.sha256(content).hexdigest()}
        assert all(one.content == content and one.num_tokens == COUNT for one in pictures)


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([chunk(encoded(), expected_tokens=5)], "the prompt: image 0 takes 6 tokens"),
        ([chunk(b"no image")], "the prompt: image 0 is not a png image"),
        ([chunk(encoded(), format="gif")], "has format 'gif'; use png or jpeg"),
        ([text(3, FORM.token)], "the token id 150 stands for an image"),
        ([chunk(encoded(401, 2))], "sides are 401 and 2 pixels"),
        ([{"tokens": [[1], [2, 3]]}], "the prompt: tokens must be a list of whole numbers"),
        ([{"tokens": None}], "the prompt: tokens must be a list of whole numbers"),
        ([{"tokens": 5}], "the prompt: tokens must be a list of whole numbers"),
        ([{"type": "image_asset_pointer", "location": "file:///etc/passwd"}], "no folder"),
    ],
)
async def test_a_prompt_with_a_bad_image_is_refused(
    chunks: list[dict[str, Any]], said: str, tmp_path: Path, backend: Seeing
):
    async with edge(config_for(tmp_path), backend) as http:
        refused = await http.post("/asample", json=prompt(*chunks))
        assert refused.status_code == 422 and said in refused.text
    assert not backend.prompts


async def test_a_base_without_a_tower_takes_no_prompt_with_images(tmp_path: Path):
    async with edge(config_for(tmp_path), AnsweringBackend(str(tmp_path))) as http:
        refused = await http.post("/asample", json=prompt(chunk(encoded()), text(3)))
        assert refused.status_code == 422 and "the base model takes no images" in refused.text
        for url in ("data:image/png;base64,eA==", "file:///etc/passwd", ""):
            part = {"type": "image_url", "image_url": {"url": url}}
            refused = await http.post(URL, json=chat(part, {"type": "text", "text": "t7"}))
            assert refused.status_code == 400, refused.text
            assert "the base model takes no images" in refused.text
        models = (await http.get("/get_server_capabilities")).json()["supported_models"]
        assert models[0]["takes_images"] is False


async def test_images_are_counted_with_the_limit_of_a_request(tmp_path: Path, backend: Seeing):
    async with edge(config_for(tmp_path, limits=LimitsConfig(images=1)), backend) as http:
        refused = await http.post("/asample", json=prompt(chunk(encoded()), chunk(encoded())))
        assert refused.status_code == 422 and "limits.images" in refused.text
        models = (await http.get("/get_server_capabilities")).json()["supported_models"]
        assert models[0]["takes_images"] is True


async def test_chats_have_images_in_data_addresses(tmp_path: Path, backend: Seeing):
    first, second = encoded(), encoded(seed=1, format="jpeg")
    async with edge(config_for(tmp_path), backend) as http:
        found = await posted(
            http,
            URL,
            **chat(
                data_url(first),
                {"type": "text", "text": "t7 t8"},
                data_url(second, "jpeg"),
                {"type": "text", "text": "t9"},
            ),
        )
        assert found["usage"]["prompt_tokens"] == 2 * COUNT + 3
        ((tokens, pictures),) = backend.prompts
        placeholders = (FORM.token,) * COUNT
        assert tokens == (*placeholders, 7, 8, *placeholders, 9)
        assert [(one.place, one.content) for one in pictures] == [(0, first), (8, second)]
        only_text = await posted(http, URL, **chat({"type": "text", "text": "t7"}))
        assert only_text["usage"]["prompt_tokens"] == 1


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (
            {"type": "image_url", "image_url": {"url": "http://10.0.0.1/a.png"}},
            "the service opens no addresses",
        ),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "opens no addresses"),
        (
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,???"}},
            "no valid base64",
        ),
        (data_url(b"no image"), "the messages: image 0 is not a png image"),
        ({"type": "text", "text": "t150"}, "do not write the placeholder"),
        ({"type": "input_audio", "input_audio": {}}, "input_audio"),
    ],
)
async def test_a_chat_with_a_bad_image_is_refused(
    part: dict[str, Any], said: str, tmp_path: Path, backend: Seeing
):
    async with edge(config_for(tmp_path), backend) as http:
        refused = await http.post(URL, json=chat(part, data_url(encoded())))
        assert refused.status_code == 400 and said in json.loads(refused.text)["error"]["message"]
    assert not backend.prompts
