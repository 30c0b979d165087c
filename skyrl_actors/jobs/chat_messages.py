"""Messages of a chat, whose contents are texts or parts with images (pure).

A part is {"type": "text", "text": …} or {"type": "image", "image": …}. OpenAI's form of an image,
{"type": "image_url", "image_url": {"url": "data:…"}}, is read too.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from skyrl_actors.jobs.encoded_images import encoded
from skyrl_actors.jobs.environment import Message
from skyrl_actors.messages.narrowing import is_mapping, is_sequence

MARKER = "<image>"  # in the texts of a dataset: the next image of the row
FORM = "a role and a content, both strings, or a content of parts with texts and images"


def normal_messages(messages: Any) -> tuple[Message, ...]:
    """Return a chat whose images are PNG or JPEG. Raises ValueError for another form."""
    if not is_sequence(messages):
        raise ValueError(f"the chat is {str(messages)[:80]}; it must be a list of messages")
    return tuple(_normal(message, iter(())) for message in messages)


def messages_with(messages: Any, images: Sequence[bytes]) -> tuple[Message, ...]:
    """Return a chat with the images of its row.

    A part {"type": "image"} and the text `<image>` each take the next image. If there are none,
    all images come before the text of the first user.

    Raises:
        ValueError: The chat has another form, or another number of images.
    """
    given = iter(images)
    found = tuple(_normal(message, given, marked=True) for message in messages)
    left = list(given)
    if left and len(left) == len(images):
        return _with_first(found, left)
    if left:
        raise ValueError(
            f"the row has {len(images)} images, and its chat has places for "
            f"{len(images) - len(left)}"
        )
    return found


def text_of(message: Message) -> str:
    """Return the text of a message, without its images."""
    content: Any = message["content"]
    return (
        content
        if isinstance(content, str)
        else "".join(part["text"] for part in content if part["type"] == "text")
    )


def images_in(messages: Sequence[Message]) -> list[bytes]:
    """Return the images of a chat in their order."""
    return [
        part["image"]
        for message in messages
        if not isinstance(message["content"], str)
        for part in message["content"]
        if part["type"] == "image"
    ]


def _normal(message: Any, images: Iterator[bytes], marked: bool = False) -> Message:
    """Return a message whose content is a text, or parts of which one at least is an image."""
    if not is_mapping(message) or not isinstance(message.get("role"), str):
        raise ValueError(f"the message is {str(message)[:80]}; it must have {FORM}")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = ""  # as in OpenAI's form
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not is_sequence(content) or not content:
        raise ValueError(f"the message is {str(message)[:80]}; it must have {FORM}")
    parts = [found for part in content for found in _parts(part, images, marked)]
    own = {str(key): value for key, value in message.items() if value is not None}
    if all(part["type"] == "text" for part in parts):
        return {**own, "content": "".join(part["text"] for part in parts)}
    return {**own, "content": parts}


def _parts(part: Any, images: Iterator[bytes], marked: bool) -> list[dict[str, Any]]:
    kind = part.get("type") if is_mapping(part) else None
    if kind == "text" and isinstance(part.get("text"), str):
        texts: list[str] = part["text"].split(MARKER) if marked else [part["text"]]
        found = [_text(texts[0])]
        for text in texts[1:]:
            found += [_image(_next(images)), _text(text)]
        return [own for own in found if own.get("text") != ""] or [_text("")]
    if kind == "image":
        given = part.get("image")
        return [_image(_next(images) if given is None else encoded(given))]
    if kind == "image_url" and is_mapping(url := part.get("image_url")):
        return [_image(encoded(url.get("url")))]
    raise ValueError(
        f"a part of the message is {str(part)[:80]}; use {{type: text, text}}, "
        "{type: image, image} or {type: image_url, image_url: {url: data:…}}"
    )


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _image(content: bytes) -> dict[str, Any]:
    return {"type": "image", "image": content}


def _next(images: Iterator[bytes]) -> bytes:
    image = next(images, None)
    if image is None:
        raise ValueError("the chat has places for more images than the row has")
    return image


def _with_first(messages: tuple[Message, ...], images: list[bytes]) -> tuple[Message, ...]:
    """Put images before the text of the first user. Raises ValueError if there is no user."""
    for i, message in enumerate(messages):
        if message["role"] == "user":
            content: Any = message["content"]
            text = [_text(content)] if isinstance(content, str) else list(content)
            first = {"role": "user", "content": [*map(_image, images), *text]}
            return (*messages[:i], first, *messages[i + 1 :])
    raise ValueError("the row has images, and its chat has no message of a user for them")
