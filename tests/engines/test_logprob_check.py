"""The trainer's scores of a version: stored with it, finite, compared only if comparable."""

import asyncio
import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from skyrl_actors.config.transfers import LogprobCheckConfig
from skyrl_actors.engines.check_prompt import fixed_prompt
from skyrl_actors.engines.logprob_check import LONGEST, LogprobCheck
from skyrl_actors.engines.partials import Partials
from skyrl_actors.journal.encoding import from_json, to_json
from skyrl_actors.messages.errors import InternalError
from skyrl_actors.messages.results import PartialSample, SampleOutput
from skyrl_actors.messages.weights import SCORED_FILE, SamplerWeights

WEIGHTS = SamplerWeights(version="m@1")


def made(dtype: str = "float32", action: str = "refuse", vocabulary: int = 256) -> LogprobCheck:
    check = LogprobCheckConfig.model_validate({"action": action})
    logprob_check = LogprobCheck(check, 1e-4, dtype, print)
    logprob_check.vocab_size = vocabulary
    logprob_check.prompt = fixed_prompt(256, 128) * 2  # an opening and its continuation
    return logprob_check


def logprobs(logprob_check: LogprobCheck) -> np.ndarray:
    return np.linspace(-9.0, -0.1, len(logprob_check.prompt) - 1, dtype=np.float32)


def test_scores_survive_the_journal_and_a_checkpoint_folder(tmp_path: Path):
    logprob_check = made()
    said = logprob_check.attach(WEIGHTS, logprobs(logprob_check))
    assert logprob_check.can_compare(said) and from_json(to_json(said)) == said
    for name, text in logprob_check.notes(logprobs(logprob_check)).items():
        (tmp_path / name).write_text(text)
    assert made().load(WEIGHTS, tmp_path) == said
    # The prompt is stored too, so another controller compares with its own engines.
    later = made()
    later.prompt = ()
    assert later.load(WEIGHTS, tmp_path) == said and later.can_compare(said)
    assert made(vocabulary=200).load(WEIGHTS, tmp_path) == WEIGHTS  # of another base model
    other = made("bfloat16")  # the bound is not meant for this dtype
    assert not other.can_compare(other.load(WEIGHTS, tmp_path))
    assert not made(action="off").can_compare(said) and not logprob_check.can_compare(WEIGHTS)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"prompt": 1}',
        '{"prompt": [1], "logprobs": ["x"], "dtype": "float32"}',
        '{"prompt": [-1, 2], "logprobs": [-0.1], "dtype": "float32"}',
        json.dumps({"prompt": [1] * (LONGEST + 1), "logprobs": [-0.1], "dtype": "float32"}),
    ],
)
def test_a_folder_with_other_content_gives_no_scores(tmp_path: Path, text: str):
    (tmp_path / SCORED_FILE).write_text(text)
    assert made().load(WEIGHTS, tmp_path) == WEIGHTS


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite_are_not_stored(value: float):
    logprob_check = made()
    diverged = logprobs(logprob_check)
    diverged[3] = value
    assert (
        logprob_check.attach(WEIGHTS, diverged) == WEIGHTS and logprob_check.notes(diverged) == {}
    )
    assert logprob_check.attach(WEIGHTS, None) == WEIGHTS


def test_a_difference_beyond_the_bound_is_refused_or_warned_about(
    capsys: pytest.CaptureFixture[str],
):
    logprob_check, warning = made(), made(action="warn")
    said = logprob_check.attach(WEIGHTS, logprobs(logprob_check))
    first = np.concatenate([[np.nan], logprobs(logprob_check)]).astype(np.float32)
    logprob_check.compare(
        "engine[0]", said, SampleOutput(sequences=(), version="m@1", prompt_logprobs=first)
    )
    assert list(logprob_check.differences) == [0.0] and logprob_check.exceeded == 0
    other = SampleOutput(sequences=(), version="m@1", prompt_logprobs=first + 0.5)
    with pytest.raises(InternalError, match=r"differ by 0\.5 nats a token on m@1"):
        logprob_check.compare("engine[0]", said, other)
    warning.compare("engine[0]", said, other)
    assert (logprob_check.exceeded, warning.exceeded) == (
        1,
        1,
    ) and "differ by 0.5 nats" in capsys.readouterr().out
    assert (
        json.loads(logprob_check.notes(logprobs(logprob_check))[SCORED_FILE])["dtype"] == "float32"
    )


@pytest.mark.parametrize(
    ("off_by", "refused"), [(5e-5, False), (5e-4, False), (2e-3, True), (np.nan, True)]
)
def test_by_default_a_difference_that_rounding_cannot_explain_is_refused(
    off_by: float, refused: bool, capsys: pytest.CaptureFixture[str]
):
    logprob_check = made(action=LogprobCheckConfig().action)
    said = logprob_check.attach(WEIGHTS, logprobs(logprob_check))
    scored = np.concatenate([[np.nan], logprobs(logprob_check) + off_by]).astype(np.float32)
    with (
        pytest.raises(InternalError, match=r"on m@1 .* sampling from it is refused")
        if refused
        else nullcontext()
    ):
        logprob_check.compare(
            "engine[0]", said, SampleOutput(sequences=(), version="m@1", prompt_logprobs=scored)
        )
    assert ("differ by" in capsys.readouterr().out) == (off_by == 5e-4)


async def test_readers_of_a_growing_sample_leave_nothing_behind():
    partials = Partials()
    patient = [asyncio.create_task(partials.after("r.0", 0, 30)) for _ in range(2)]
    assert await partials.after("r.0", 0, 0.01) == PartialSample()  # a timeout wakes no one else
    given_up = asyncio.create_task(partials.after("r.0", 0, 30))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    partials.grow("r.0", PartialSample((7,), (-0.5,)))
    assert await asyncio.wait_for(asyncio.gather(*patient), 5) == [PartialSample((7,), (-0.5,))] * 2
    waiting = asyncio.create_task(partials.after("r.0", 1, 30))
    await asyncio.sleep(0)
    partials.end("r.0")
    assert await asyncio.wait_for(waiting, 5) == PartialSample()
    late = asyncio.create_task(partials.after("r.0", 1, 30))  # after the sample ended
    await asyncio.sleep(0)
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    assert partials._waiting == {} and partials._growing == {}
