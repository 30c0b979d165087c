"""What the trainer said of a version: kept with it, compared only where it can be, and never what is no number."""

import asyncio
import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from skyrl_actors.config.transfers import LogprobCheck
from skyrl_actors.engines.agreement import Agreement
from skyrl_actors.engines.partials import Partials
from skyrl_actors.journal.encoding import from_json, to_json
from skyrl_actors.messages.errors import InternalError
from skyrl_actors.messages.results import PartialSample, SampleOutput
from skyrl_actors.messages.weights import SCORED_FILE, SamplerWeights

WEIGHTS = SamplerWeights("m@1")


def made(dtype: str = "float32", action: str = "refuse", vocabulary: int = 256) -> Agreement:
    check = LogprobCheck.model_validate({"action": action})
    agreement = Agreement(check, 1e-4, dtype, print)
    agreement.choose_prompt(vocabulary, 128)
    return agreement


def logprobs(agreement: Agreement) -> np.ndarray:
    return np.linspace(-9.0, -0.1, len(agreement.prompt) - 1, dtype=np.float32)


def test_what_was_said_goes_through_the_journal_and_through_a_folder(tmp_path: Path):
    agreement = made()
    said = agreement.said(WEIGHTS, logprobs(agreement))
    assert agreement.can_compare(said) and from_json(to_json(said)) == said
    for name, text in agreement.notes(logprobs(agreement)).items():
        (tmp_path / name).write_text(text)
    assert made().remembered(WEIGHTS, tmp_path) == said
    assert made(vocabulary=300).remembered(WEIGHTS, tmp_path) == WEIGHTS  # another prompt
    assert not made("bfloat16").can_compare(made("bfloat16").remembered(WEIGHTS, tmp_path))  # for which this bound is not meant
    assert not made(action="off").can_compare(said) and not agreement.can_compare(WEIGHTS)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"prompt": 1}', '{"prompt": [1], "logprobs": ["x"], "dtype": "float32"}'])
def test_a_folder_with_something_else(tmp_path: Path, text: str):
    (tmp_path / SCORED_FILE).write_text(text)
    assert made().remembered(WEIGHTS, tmp_path) == WEIGHTS


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_not_kept(value: float):
    agreement = made()
    diverged = logprobs(agreement)
    diverged[3] = value
    assert agreement.said(WEIGHTS, diverged) == WEIGHTS and agreement.notes(diverged) == {}
    assert agreement.said(WEIGHTS, None) == WEIGHTS


def test_beyond_the_bound(capsys: pytest.CaptureFixture[str]):
    agreement, warning = made(), made(action="warn")
    said = agreement.said(WEIGHTS, logprobs(agreement))
    first = np.concatenate([[np.nan], logprobs(agreement)]).astype(np.float32)
    agreement.compare("engine[0]", said, SampleOutput((), "m@1", prompt_logprobs=first))
    assert list(agreement.differences) == [0.0] and agreement.exceeded == 0
    other = SampleOutput((), "m@1", prompt_logprobs=first + 0.5)
    with pytest.raises(InternalError, match=r"differ by 0\.5 nats a token on m@1"):
        agreement.compare("engine[0]", said, other)
    warning.compare("engine[0]", said, other)
    assert (agreement.exceeded, warning.exceeded) == (1, 1) and "differ by 0.5 nats" in capsys.readouterr().out
    assert json.loads(agreement.notes(logprobs(agreement))[SCORED_FILE])["dtype"] == "float32"


@pytest.mark.parametrize(("off_by", "refused"), [(5e-5, False), (5e-4, False), (2e-3, True), (np.nan, True)])
def test_by_default_what_is_no_rounding_is_refused(off_by: float, refused: bool, capsys: pytest.CaptureFixture[str]):
    agreement = made(action=LogprobCheck().action)
    said = agreement.said(WEIGHTS, logprobs(agreement))
    scored = np.concatenate([[np.nan], logprobs(agreement) + off_by]).astype(np.float32)
    with pytest.raises(InternalError, match=r"on m@1 .* sampling from it is refused") if refused else nullcontext():
        agreement.compare("engine[0]", said, SampleOutput((), "m@1", prompt_logprobs=scored))
    assert ("differ by" in capsys.readouterr().out) == (off_by == 5e-4)


async def test_readers_of_a_growing_sample_leave_nothing_behind():
    partials = Partials()
    patient = [asyncio.create_task(partials.after("r.0", 0, 30)) for _ in range(2)]
    assert await partials.after("r.0", 0, 0.01) == PartialSample()  # who gives up wakes nobody else
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
    late = asyncio.create_task(partials.after("r.0", 1, 30))  # it had ended before
    await asyncio.sleep(0)
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    assert partials._waiting == {} and partials._growing == {}
