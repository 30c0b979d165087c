"""Samples at a temperature other than 1, compared with softmax in float64.

The correction uses logprobs at the sampling temperature, and the mismatch uses logprobs at 1.
"""

from typing import Any, cast

import numpy as np
import pytest

from skyrl_actors.config.job import RlConfig
from skyrl_actors.jobs.envs import ReverseTask
from skyrl_actors.jobs.rollout import Piece, Rollout
from skyrl_actors.jobs.rollout_source import distribution, params_of
from skyrl_actors.jobs.update import Batch, Updates, off_policy
from skyrl_actors.losses import find

VOCABULARY, LENGTH = 12, 400
NOISE = 1e-3  # between engine and trainer, nats


def log_softmax64(logits: np.ndarray, temperature: float) -> np.ndarray:
    scaled = logits / temperature - (logits / temperature).max(-1, keepdims=True)
    return scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))


def sampled(temperature: float, tempered: bool = True) -> tuple[Batch, np.ndarray, np.ndarray]:
    """Return a batch of one answer, and logprobs [R, V] at temperature 1 and at `temperature`."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (LENGTH, VOCABULARY))
    drawn_from = log_softmax64(logits, temperature)
    tokens = np.asarray([rng.choice(VOCABULARY, p=np.exp(row)) for row in drawn_from], np.int32)
    places, every = np.arange(LENGTH), np.ones(LENGTH, bool)
    at_one = log_softmax64(logits, 1.0)
    engine = at_one[places, tokens].astype(np.float32)
    rollout = Rollout(
        task=ReverseTask("a", "b"),
        group=0,
        prompt=(1,),
        answer=tokens,
        sampled=every,
        logprobs=engine,
        rewards=np.zeros(LENGTH),
        text="",
        pieces=(Piece("v", 0, LENGTH),),
        tempered=drawn_from[places, tokens].astype(np.float32) if tempered else None,
    )
    return (
        Batch(
            rollouts=[rollout],
            logprobs=[(engine + rng.normal(0, NOISE, LENGTH)).astype(np.float32)],
        ),
        at_one,
        drawn_from,
    )


def config(**given: Any) -> RlConfig:
    return RlConfig.model_validate({"type": "grpo", **given})


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_correction_is_the_ratio_to_the_sampling_distribution(temperature: float, level: str):
    batch, _, drawn_from = sampled(temperature)
    corrected = config(
        temperature=temperature, correction={"type": "truncated", "level": level, "high": 1e9}
    )
    (weights,) = Updates(corrected, batch, 0.0, LENGTH).corrections
    drift = batch.logprobs[0] - drawn_from[np.arange(LENGTH), batch.rollouts[0].answer]
    expected = np.exp(drift if level == "token" else np.full(LENGTH, drift.mean()))
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_corrected_weights_give_expectations_at_temperature_1(temperature: float):
    """The expected weight is 1, and the expected weight · f is the mean of f at temperature 1.

    Both are exact sums over all tokens.
    """
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
        (weights,) = Updates(
            config(temperature=temperature, correction=correction), batch, 0.0, LENGTH
        ).corrections
        total += np.exp(drawn_from[:, token]) * weights
        moment += np.exp(drawn_from[:, token]) * weights * f[token]
    np.testing.assert_allclose(total, 1.0, atol=1e-5)
    np.testing.assert_allclose(moment, np.exp(at_one) @ f, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_the_mismatch_compares_logprobs_at_temperature_1(temperature: float):
    batch, at_one, drawn_from = sampled(temperature)
    found = off_policy(batch, 1)
    assert found["logprob_mismatch"] == pytest.approx(NOISE * np.sqrt(2 / np.pi), rel=0.2)
    # Logprobs at different temperatures would differ far more.
    assert np.abs(at_one - drawn_from).mean() > 100 * NOISE


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_ratios_and_weights_of_a_job_in_the_sampling_distribution_are_1(temperature: float):
    batch, _, drawn_from = sampled(temperature)
    batch.logprobs[0][:] = drawn_from[np.arange(LENGTH), batch.rollouts[0].answer]
    job = config(
        temperature=temperature,
        top_p=0.9,
        processed_logprobs=True,
        correction={"type": "truncated", "high": 1e9},
    )
    updates = Updates(job, batch, 0.0, LENGTH)
    np.testing.assert_array_equal(updates.corrections[0], 1.0)
    assert off_policy(batch, 1, processed=True)["logprob_mismatch_max"] == 0
    assert off_policy(batch, 1)["logprob_mismatch"] > 100 * NOISE
    options = distribution(job)
    assert options == {"temperature": temperature, "top_k": -1.0, "top_p": 0.9}
    assert find("ppo").checked(options).config.items() >= options.items()
    assert distribution(config(temperature=temperature)) == {}


def test_processed_logprobs_are_requested_only_where_they_are_used():
    corrected, processed = {"type": "truncated"}, config(top_p=0.9, processed_logprobs=True)
    asked = params_of(config(temperature=0.7, correction=corrected), 4, 0.7)
    assert asked.processed_logprobs and asked.processes
    assert not params_of(config(temperature=0.7), 4, 0.7).processes
    assert params_of(processed, 4, 1.0).processes and params_of(processed, 4, 1.0).top_p == 0.9
    assert not params_of(processed, 1, 0.0).processes  # an evaluation
    assert not params_of(config(correction=corrected), 4, 1.0).processes  # they are equal
