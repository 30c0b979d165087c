"""Samples at another temperature than 1: which logprobs a correction and the mismatch are made of, against softmax in float64."""

from typing import Any, cast

import numpy as np
import pytest

from skyrl_actors.config.job import RlConfig
from skyrl_actors.jobs.draws import params_of
from skyrl_actors.jobs.envs import ReverseTask
from skyrl_actors.jobs.rollout import Piece, Rollout
from skyrl_actors.jobs.update import Batch, Updates, off_policy

VOCABULARY, LENGTH = 12, 400
NOISE = 1e-3  # between engine and trainer, nats


def log_softmax64(logits: np.ndarray, temperature: float) -> np.ndarray:
    scaled = logits / temperature - (logits / temperature).max(-1, keepdims=True)
    return scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))


def sampled(temperature: float, tempered: bool = True) -> tuple[Batch, np.ndarray, np.ndarray]:
    """A batch of one answer, and [R, V] logprobs of the trainer at 1 and of the engine at `temperature`."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (LENGTH, VOCABULARY))
    drawn_from = log_softmax64(logits, temperature)
    tokens = np.asarray([rng.choice(VOCABULARY, p=np.exp(row)) for row in drawn_from], np.int32)
    places, every = np.arange(LENGTH), np.ones(LENGTH, bool)
    at_one = log_softmax64(logits, 1.0)
    engine = at_one[places, tokens].astype(np.float32)
    rollout = Rollout(
        ReverseTask("a", "b"), 0, (1,), tokens, every, engine, np.zeros(LENGTH), "", pieces=(Piece("v", 0, LENGTH),),
        tempered=drawn_from[places, tokens].astype(np.float32) if tempered else None,
    )  # fmt: skip
    return Batch([rollout], [(engine + rng.normal(0, NOISE, LENGTH)).astype(np.float32)]), at_one, drawn_from


def config(**given: Any) -> RlConfig:
    return RlConfig.model_validate({"type": "grpo", **given})


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_correction_is_the_ratio_to_the_distribution_that_was_sampled_from(temperature: float, level: str):
    batch, _, drawn_from = sampled(temperature)
    corrected = config(temperature=temperature, correction={"type": "truncated", "level": level, "high": 1e9})
    (weights,) = Updates(corrected, batch, 0.0, LENGTH).corrections
    drift = batch.logprobs[0] - drawn_from[np.arange(LENGTH), batch.rollouts[0].answer]
    expected = np.exp(drift if level == "token" else np.full(LENGTH, drift.mean()))
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_corrected_weights_make_samples_those_of_temperature_1(temperature: float):
    """Over all tokens that might have been drawn: the mean of the weights is 1, and of weights times f the mean of f at 1."""
    _, at_one, drawn_from = sampled(temperature)
    places, f = np.arange(LENGTH), np.random.default_rng(1).normal(0, 1, VOCABULARY)
    total, moment = np.zeros(LENGTH), np.zeros(LENGTH)
    for token in range(VOCABULARY):
        batch, *_ = sampled(temperature)
        rollout = batch.rollouts[0]
        rollout.answer[:] = token
        rollout.logprobs[:] = at_one[places, token]
        cast(Any, rollout.tempered)[:] = drawn_from[places, token]
        batch.logprobs[0][:] = at_one[places, token]
        correction = {"type": "truncated", "high": 1e9}
        (weights,) = Updates(config(temperature=temperature, correction=correction), batch, 0.0, LENGTH).corrections
        total += np.exp(drawn_from[:, token]) * weights
        moment += np.exp(drawn_from[:, token]) * weights * f[token]
    np.testing.assert_allclose(total, 1.0, atol=1e-5)
    np.testing.assert_allclose(moment, np.exp(at_one) @ f, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_the_mismatch_compares_both_programs_at_temperature_1(temperature: float):
    batch, at_one, drawn_from = sampled(temperature)
    found = off_policy(batch, 1)
    assert found["logprob_mismatch"] == pytest.approx(NOISE * np.sqrt(2 / np.pi), rel=0.2)
    assert np.abs(at_one - drawn_from).mean() > 100 * NOISE  # what it would be between temperatures


def test_logprobs_of_the_sampling_temperature_are_asked_for_where_a_ratio_needs_them():
    corrected = config(temperature=0.7, correction={"type": "truncated"})
    assert params_of(corrected, 4, 0.7).tempers and not params_of(config(temperature=0.7), 4, 0.7).tempers
    assert not params_of(corrected, 1, 0.0).tempers  # an evaluation
    assert not params_of(config(correction={"type": "truncated"}), 4, 1.0).tempers  # they are equal
