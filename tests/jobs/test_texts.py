"""Rows of supervised jobs: what is learned, and what is refused with its row."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_actors.config.supervised import DpoConfig, SftConfig
from skyrl_actors.jobs.chat import Chat
from skyrl_actors.jobs.texts import preference_texts, sft_texts
from skyrl_actors.messages.errors import ConfigError

# Qwen3's rule: the last turn of the assistant begins with an empty block of thoughts.
LAST_THINKS = (
    "{% for m in messages %}<|im_start|>{{m.role}}\n"
    "{% if m.role=='assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{m.content}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{{m.content}}{% endfor %}"
)


@pytest.fixture
def chat(random_base: Path) -> Chat:
    return Chat(str(random_base))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def rows(folder: Path, *found: dict[str, Any]) -> dict[str, str]:
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return {"path": str(folder / "d.jsonl")}


def sft(folder: Path, *found: dict[str, Any]) -> SftConfig:
    columns = {"prompt_column": "prompt", "completion_column": "completion"}
    given = {"data": rows(folder, *found), "eval_rows": 1, "type": "sft", **columns}
    return SftConfig.model_validate(given)


def test_turns_of_a_completion_that_the_prompt_lacks_are_refused(tmp_path: Path, chat: Chat):
    right = {"prompt": [user("2+2?")], "completion": [assistant("4")]}
    wrong = {
        "prompt": [user("2+2?")],
        "completion": [assistant("4"), user("times 3?"), assistant("12")],
    }
    with pytest.raises(ConfigError, match=r"d\.jsonl, row 3.*turns before its answer"):
        sft_texts(sft(tmp_path, right, right, wrong), chat, 512)
    assert len(sft_texts(sft(tmp_path, right, right, right), chat, 512).train) == 2


def test_only_the_answer_is_learned_when_a_template_changes_earlier_turns(
    tmp_path: Path, chat: Chat
):
    chat.tokenizer.chat_template = LAST_THINKS
    prompt = [user("2+2?"), assistant("4"), user("times 3?")]
    row = {"prompt": prompt, "chosen": "12", "rejected": "13"}
    config = DpoConfig.model_validate({"data": rows(tmp_path, row, row, row), "eval_rows": 1})
    (chosen, _), *_ = preference_texts(config, chat, 512).train
    before = len(chat.prompt(prompt).tokens)
    assert not chosen.learned[:before].any() and chosen.learned[before:].all()
    learnt = chosen.tokens[before:].tolist()
    assert chat.text(learnt).startswith("<think>\n\n</think>\n\n12")
    whole = chat.prompt(prompt).tokens
    assert np.array_equal(chosen.tokens[:before], whole)


@pytest.mark.parametrize(
    "template, prompt, said",
    [
        (LAST_THINKS, [user("half an emoji \ud83d")], "the chat cannot be tokenized"),
        (NO_SYSTEM, [{"role": "system", "content": "s"}, user("q")], "System role not supported"),
        (None, [user("q")], "the chat cannot be tokenized"),
    ],
)
def test_a_row_that_cannot_be_tokenized_is_named(
    template: str | None, prompt: Any, said: str, tmp_path: Path, chat: Chat
):
    chat.tokenizer.chat_template = template
    row = {"prompt": prompt, "completion": "x"}
    with pytest.raises(ConfigError, match=rf"d\.jsonl, row \d.*{said}"):
        sft_texts(sft(tmp_path, row, row), chat, 512)
