"""Images in jobs: rows of datasets, prompts, episodes, and the rows to train on."""

import base64
import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
import pytest
from PIL import Image

from skyrl_actors.backends.base_models import base_model_folder
from skyrl_actors.config.base_models import TinyVlBase
from skyrl_actors.config.environments import CustomEnv, DatasetConfig, RewardEnv
from skyrl_actors.config.limits import LimitsConfig
from skyrl_actors.config.supervised import DpoConfig, SftConfig
from skyrl_actors.jobs.chat import Chat
from skyrl_actors.jobs.chat_messages import images_in, normal_messages, text_of
from skyrl_actors.jobs.chat_rows import messages_of
from skyrl_actors.jobs.dataset_tasks import custom_tasks, reward_tasks
from skyrl_actors.jobs.datasets import read
from skyrl_actors.jobs.encoded_images import encoded, shown
from skyrl_actors.jobs.environment import Message, Step
from skyrl_actors.jobs.rollout import rows_of
from skyrl_actors.jobs.session import PART_IMAGE_BYTES, split
from skyrl_actors.jobs.shapes import ShapeTasks, drawing
from skyrl_actors.jobs.texts import critic_rows, policy_rows, preference_texts, sft_texts
from skyrl_actors.messages.columns import Columns, columns_from
from skyrl_actors.messages.errors import ConfigError, InvalidRequest
from skyrl_actors.messages.example import Example
from skyrl_actors.messages.images import Picture
from tests.jobs.test_episodes import FakeTask, play

IMAGE_TOKENS = 4  # of a drawing


def png(seed: int = 0, colour: str = "red", shape: str = "cross") -> bytes:
    return drawing(random.Random(seed), colour, shape)


def photo(format: str, size: tuple[int, int] = (32, 32)) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", size, (200, 30, 30)).save(content, format)
    return content.getvalue()


@pytest.fixture(scope="module")
def vision_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("vision")))
        return base_model_folder(TinyVlBase(name="tiny-vl", warmup_steps=0), lambda count: [])


@pytest.fixture(scope="module")
def chat(vision_base: Path) -> Chat:
    return Chat(str(vision_base))


def asked(image: Any, text: str = "Name?") -> list[Message]:
    parts = [{"type": "image", "image": image}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


def placeholder_of(chat: Chat) -> int:
    return chat.tokenizer.convert_tokens_to_ids("<|image_pad|>")


def test_a_message_has_a_text_or_parts_with_images():
    image = png()
    address = "data:image/png;base64," + base64.b64encode(image).decode()
    openai = {"type": "image_url", "image_url": {"url": address}}
    (only_text,) = normal_messages(
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            }
        ]
    )
    assert only_text == {"role": "user", "content": "ab"}
    (message,) = normal_messages(
        [{"role": "user", "content": [openai, {"type": "text", "text": "what?"}], "name": "x"}]
    )
    assert message == {**asked(image, "what?")[0], "name": "x"}
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "name": None}
    (message,) = normal_messages([called])
    assert message == {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    (message,) = asked(image, "what?")
    assert text_of(message) == "what?" and images_in([only_text, message]) == [image]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image", "image": "/etc/passwd"}, "use a data: address or bytes"),
        ({"type": "image_url", "image_url": {"url": "http://host/a.png"}}, "use a data: address"),
        ({"type": "image"}, "more images than the row has"),
        ({"type": "image", "image": b"no image"}, "cannot be read"),
        ({"type": "video", "video": "x"}, "a part of the message is"),
    ],
)
def test_parts_that_cannot_be_used_are_refused(part: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        normal_messages([{"role": "user", "content": [part]}])


def test_images_of_any_format_become_png_or_jpeg(tmp_path: Path):
    jpeg, image = photo("JPEG"), png()
    (tmp_path / "a.png").write_bytes(image)
    assert encoded(jpeg) == jpeg and encoded({"bytes": image, "path": None}) == image
    assert encoded({"bytes": None, "path": "a.png"}, tmp_path) == image
    assert encoded("a.png", tmp_path) == encoded(str(tmp_path / "a.png"), Path()) == image
    for other in (photo("WEBP"), photo("BMP"), Image.open(io.BytesIO(jpeg))):
        assert Image.open(io.BytesIO(encoded(other))).format == "PNG"
    with pytest.raises(ValueError, match=r"b\.png: No such file"):
        encoded("b.png", tmp_path)
    assert max(Image.open(io.BytesIO(shown(photo("PNG", (900, 300))))).size) == 256


def test_images_of_a_row_take_the_places_of_its_chat():
    one, two = png(1), png(2)
    image, text = {"type": "image"}, {"type": "text", "text": "x"}
    first = messages_of("which?", "here", [one, two])
    assert first[0]["content"] == [
        {"type": "image", "image": one},
        {"type": "image", "image": two},
        {"type": "text", "text": "which?"},
    ]
    marked = messages_of("<image>a<image>b", "here", [one, two])
    assert [part["type"] for part in marked[0]["content"]] == ["image", "text", "image", "text"]
    parts = messages_of([{"role": "user", "content": [text, image]}], "here", [two])
    assert images_in(parts) == [two] and parts[0]["content"][0] == text
    # Without a column of images, the text is no mark.
    assert messages_of("<image>a", "here")[0]["content"] == "<image>a"
    for given, images, message in (
        ("<image>a", [], "more images than the row has"),
        ("<image>a", [one, two], "has 2 images, and its chat has places for 1"),
        ([{"role": "system", "content": "a"}], [one], "no message of a user"),
    ):
        with pytest.raises(ConfigError, match=message):
            messages_of(given, "here", images)


def test_all_formats_of_datasets_give_the_same_images(tmp_path: Path):
    image = png()
    (tmp_path / "a.png").write_bytes(image)
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"prompt": "Name?", "images": ["a.png"]}) + "\n" + json.dumps({"prompt": "b"})
    )
    rows = [{"prompt": "Name?", "images": [{"bytes": image, "path": None}]}]
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "images": datasets.Sequence(datasets.Image())}
    )
    whole = cast(Any, datasets.Dataset).from_list(rows, features=features)
    whole.save_to_disk(str(tmp_path / "saved"))
    whole.to_parquet(str(tmp_path / "rows.parquet"))
    for name in ("saved", "rows.parquet"):
        found = read(DatasetConfig(path=str(tmp_path / name)), ["prompt"], "images")
        assert list(found) == [{"prompt": "Name?", "images": [image]}]
    config = DatasetConfig(path=str(tmp_path / "rows.jsonl"))
    with pytest.raises(ConfigError, match="row 2: no column 'images'"):
        read(config, ["prompt"], "images")
    limited = config.model_copy(update={"limit": 1})
    assert read(limited, ["prompt"], "images")[0]["images"] == [image]


def test_a_prompt_has_a_place_for_each_token_of_an_image(chat: Chat):
    image = png()
    prompt = chat.prompt(asked(image))
    (picture,) = prompt.pictures
    assert picture.content == image and picture.num_tokens == IMAGE_TOKENS
    places = [i for i, token in enumerate(prompt.tokens) if token == placeholder_of(chat)]
    assert places == list(range(picture.place, picture.place + IMAGE_TOKENS))
    with pytest.raises(InvalidRequest, match="puts 1 images into a prompt of messages with 0"):
        chat.prompt([{"role": "user", "content": "<|image_pad|>"}])


def test_limits_of_images_hold_in_jobs(vision_base: Path, random_base: Path):
    strict = Chat(str(vision_base), limits=LimitsConfig(image_pixels=100))
    with pytest.raises(InvalidRequest, match=r"32 x 32 pixels; at most 100 .*limits.image_pixels"):
        strict.prompt(asked(png()))
    with pytest.raises(InvalidRequest, match="the base model takes no images"):
        Chat(str(random_base)).prompt(asked(png()))


def test_a_conversation_learns_answers_after_images(chat: Chat):
    one, two = png(1), png(2)
    turns = [*asked(one), {"role": "assistant", "content": "red"}]
    turns += [*asked(two, "Shape?"), {"role": "assistant", "content": "cross"}]
    found, learned = chat.conversation(turns)
    assert [picture.content for picture in found.pictures] == [one, two]
    tokens = np.asarray(found.tokens)
    assert chat.tokenizer.decode(tokens[learned]) == "red<|im_end|>cross<|im_end|>"
    for picture in found.pictures:
        own = tokens[picture.place : picture.place + picture.num_tokens]
        assert (own == placeholder_of(chat)).all()


class ImageAfterTheAnswer:
    """An episode whose second turn brings a second image."""

    def __init__(self) -> None:
        self.turns = 0

    async def start(self) -> Sequence[Message]:
        return asked(png(1))

    async def step(self, answer: str) -> Step:
        self.turns += 1
        return Step(1.0, self.turns == 2, () if self.turns == 2 else asked(png(2), "and?"))

    async def close(self) -> None:
        pass


def test_episodes_carry_their_images_to_engines_and_rows(chat: Chat):
    drawn, client = play(chat, [FakeTask(ImageAfterTheAnswer)], n=2, max_turns=3)
    first, second = client.asked[0], client.asked[1]
    assert first.params.num_samples == 2  # equal prompts are one request
    assert [p.content for p in first.pictures] == [png(1)]
    assert [p.content for p in second.pictures] == [png(1), png(2)]
    rollout = drawn.rollouts[0]
    rows = rows_of(drawn.rollouts, {"weights": [r.sampled * 1.0 for r in drawn.rollouts]})
    for row in range(2):
        start = int(rows.offsets[row])
        for image in rows.images_of(row):
            own = rows.tokens[image.start : image.start + image.num_tokens]
            assert (own == placeholder_of(chat)).all() and image.num_tokens == IMAGE_TOKENS
        assert [i.start - start for i in rows.images_of(row)] == [p.place for p in rollout.pictures]
    assert rows.images is not None and len(rows.images.contents) == 2  # equal ones are held once
    learned = rows.fields["target_tokens"][rows.fields["weights"] != 0]
    assert chat.tokenizer.decode(learned) == f"b{chat.tokenizer.eos_token}" * 4


def test_an_image_that_cannot_be_used_drops_only_its_episode(chat: Chat, random_base: Path):
    class Damaged(ImageAfterTheAnswer):
        async def start(self) -> Sequence[Message]:
            return asked(png()[:60])

    drawn, _ = play(chat, [FakeTask(Damaged), FakeTask(ImageAfterTheAnswer)], max_turns=2)
    assert len(drawn.rollouts) == 1 and drawn.failures.total() == 1
    drawn, _ = play(Chat(str(random_base)), [FakeTask(ImageAfterTheAnswer)])
    assert not drawn.rollouts and "takes no images" in drawn.failure_summary()


def test_supervised_rows_have_their_images(chat: Chat, tmp_path: Path):
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(png(i))
    rows = [
        {"prompt": "Name?", "completion": "a", "bad": "b", "images": f"{i}.png"} for i in range(3)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"data": {"path": str(file)}, "eval_rows": 1, "images_column": "images"}
    texts = sft_texts(SftConfig.model_validate(data), chat, 512)
    made = policy_rows(texts.train)
    assert made.images is not None and made.images.contents == (png(0), png(1))
    pairs = preference_texts(
        DpoConfig.model_validate(data | {"chosen_column": "completion", "rejected_column": "bad"}),
        chat,
        512,
    )
    both = critic_rows([text for pair in pairs.train for text in pair], {})
    assert both.images is not None and both.images.contents == (png(0), png(1))
    assert len(both.images.starts) == 4


def test_rewards_see_the_row_and_the_text_of_the_prompt(chat: Chat, tmp_path: Path):
    (tmp_path / "a.png").write_bytes(png())
    row = {"prompt": "Name?", "images": ["a.png"], "answer": "b"}
    (tmp_path / "rows.jsonl").write_text(2 * (json.dumps(row) + "\n"))
    (tmp_path / "rewards.py").write_text(
        "def score(prompt, completion, row):\n"
        "    return float(prompt == 'Name?' and row['images'][0][:4] == b'\\x89PNG')\n"
    )
    config = RewardEnv(
        data=DatasetConfig(path=str(tmp_path / "rows.jsonl")),
        eval_prompts=1,
        images_column="images",
        reward=f"{tmp_path}/rewards.py:score",
    )
    tasks = reward_tasks(config, 0)
    assert tasks.evaluation[0].question == "Name?"
    drawn, client = play(chat, tasks.evaluation)
    assert drawn.rollouts[0].reward == 1.0 and len(client.asked[0].pictures) == 1


def test_batches_of_shapes_depend_on_the_seed_and_differ_from_the_evaluation():
    made_by = f"{ShapeTasks.__module__}:{ShapeTasks.__name__}"
    one, two = (
        custom_tasks(CustomEnv(tasks=made_by, options={"eval_prompts": 32}), 3) for _ in range(2)
    )
    assert one.batch(8, 1) == two.batch(8, 1) != one.batch(8, 2)
    assert len(one.evaluation) == 32
    held_out = {cast(Any, task).image for task in one.evaluation}
    assert not held_out & {cast(Any, task).image for task in one.batch(64, 0)}


def rows_with(images: list[bytes]) -> Columns:
    examples = [
        Example(
            np.arange(6, dtype=np.int32) + i,
            {"weights": np.full(6, i, np.float32)},
            (Picture(1, f"{len(content)}-{i % 2}", content, (1, 4, 4), IMAGE_TOKENS),),
        )
        for i, content in enumerate(images)
    ]
    return columns_from(examples)


def test_large_images_are_sent_in_several_requests():
    large = PART_IMAGE_BYTES // 2 - 1
    parts = split(rows_with([bytes([i]) * large for i in range(5)]))
    assert [part.num_rows for part in parts] == [2, 2, 1]
    assert [image.start for part in parts for image in part.images_of(0)] == [1, 1, 1]
    assert [int(part.tokens[0]) for part in parts] == [0, 2, 4]
    assert next(parts[1].images_of(1)).start == 7


def test_an_image_of_an_assistant_is_no_target(chat: Chat):
    answer = {"role": "assistant", "content": asked(png(1), "done")[0]["content"]}
    with pytest.raises(InvalidRequest, match="a message of the assistant has an image"):
        chat.conversation([*asked(png(0), "draw"), answer])
