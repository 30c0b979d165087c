"""Rewards and environments are tried before anything starts, and errors show the user's lines."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl_actors.config.environments import RewardEnv
from skyrl_actors.jobs.chat import Chat
from skyrl_actors.jobs.dataset_tasks import reward_tasks
from skyrl_actors.jobs.trial import try_tasks
from skyrl_actors.messages.errors import ConfigError

ROWS = '{"prompt": "p1", "a": 1}\n{"prompt": "p2"}\n{"prompt": "p3"}\n{"prompt": "p4"}\n'


@pytest.fixture(scope="module")
def chat(random_base: Path) -> Chat:
    return Chat(str(random_base))


@pytest.fixture
def tried(tmp_path: Path, chat: Chat) -> Callable[[str], None]:
    def run(code: str, timeout_s: float = 5.0) -> None:
        (tmp_path / "rows.jsonl").write_text(ROWS)
        (tmp_path / "rewards.py").write_text(textwrap.dedent(code))
        config = RewardEnv(
            type="reward",
            data={"path": str(tmp_path / "rows.jsonl")},
            reward=f"{tmp_path}/rewards.py:score",
            eval_prompts=3,
        )
        try_tasks(reward_tasks(config, 0), chat, timeout_s, "env.reward")

    return run


def test_what_the_function_raised_is_shown_with_its_lines(tried: Callable[[str], None]):
    code = """
        def deep(row):
            return row["missing"]

        def score(prompt, completion, row):
            return deep(row)
    """
    with pytest.raises(ConfigError) as raised:
        tried(code)
    text = str(raised.value)
    assert "env.reward failed for 3 of 3 rows, before anything was started" in text
    assert 'rewards.py", line 6, in score' in text and 'rewards.py", line 3, in deep' in text
    assert 'return row["missing"]' in text and text.endswith("KeyError: 'missing'")
    assert "skyrl_actors/jobs" not in text and "asyncio" not in text


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("def score(prompt, completion): return 1.0", "takes 2 positional arguments but 3 were"),
        ("def score(*a): return '1.0'", "the reward was '1.0' of type str; a number is needed"),
        ("def score(*a): return None", "the reward was 'None' of type NoneType"),
        ("def score(*a): return float('nan')", "the reward was nan; a finite number is needed"),
        ("async def score(*a): raise ValueError('late')", "ValueError: late"),
        ("import time\ndef score(*a): time.sleep(9)", "step took longer than env.timeout_s 0.2 s"),
    ],
)
def test_functions_that_cannot_work_are_refused(tried: Any, body: str, why: str):
    with pytest.raises(ConfigError, match="failed for 3 of 3 rows") as raised:
        tried(body, 0.2)
    assert why in str(raised.value)


@pytest.mark.parametrize(
    "body",
    [
        "def score(*a): return True",
        "import numpy\ndef score(*a): return numpy.float32(0.5)",
        "async def score(*a): return 1",
        "def score(prompt, completion, row): return 1 / (prompt != 'p1')",  # one row is bad
    ],
)
def test_functions_that_work_for_one_of_the_first_rows_are_accepted(tried: Any, body: str):
    tried(body)
