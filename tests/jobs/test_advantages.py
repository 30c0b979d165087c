import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_actors.config.job import ReverseEnv
from skyrl_actors.jobs import advantages as adv
from skyrl_actors.jobs.envs import ReverseTasks, noisy_demonstrations

FLOATS = st.floats(-3, 3, width=32)


@given(st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=20), st.floats(0.5, 1.0), st.floats(0.0, 1.0))
def test_gae_is_the_sum_of_discounted_errors(pairs, gamma, lam):
    rewards, values = (np.asarray(x, np.float64) for x in zip(*pairs, strict=True))
    advantages, returns = adv.gae(rewards, values, gamma, lam)
    following = np.append(values[1:], 0.0)
    deltas = rewards + gamma * following - values
    for t in range(len(rewards)):
        expected = sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(rewards)))
        assert advantages[t] == pytest.approx(expected, rel=1e-6, abs=1e-6)
    np.testing.assert_allclose(returns, advantages + values)


def test_gae_at_its_ends():
    rewards, values = np.asarray([0.0, 0.0, 1.0]), np.asarray([0.2, 0.4, 0.6])
    np.testing.assert_allclose(adv.gae(rewards, values, 1.0, 1.0)[1], [1, 1, 1])  # Monte Carlo returns
    np.testing.assert_allclose(adv.gae(rewards, values, 1.0, 0.0)[0], [0.2, 0.2, 0.4])  # one-step errors


def test_token_rewards():
    rewards = adv.token_rewards(1.0, np.asarray([-1.0, -2.0]), np.asarray([-1.5, -1.0]), 0.1)
    np.testing.assert_allclose(rewards, [-0.05, 1.1])


def test_statistics():
    white = np.concatenate(adv.whiten([np.asarray([1.0, 2.0]), np.asarray([3.0])]))
    assert white.mean() == pytest.approx(0, abs=1e-9) and white.std() == pytest.approx(1, rel=1e-6)
    same = np.asarray([-1.0, -2.0], np.float32)
    assert adv.kl_estimate(same, same) == 0
    assert adv.kl_estimate(same, same + 0.3) > 0
    assert adv.explained_variance(np.asarray([1.0, 2.0]), np.asarray([1.0, 2.0])) == 1
    assert adv.explained_variance(np.asarray([1.5, 1.5]), np.asarray([1.0, 2.0])) == 0


def test_held_out_words_never_come_up_in_training():
    tasks = ReverseTasks(ReverseEnv(), seed=0)
    held_out = {task.question for task in tasks.evaluation}
    assert len(held_out) == 200
    for seed in range(50):
        assert not held_out & {task.question for task in tasks.batch(64, seed)}
    assert not held_out & {task.question for task in noisy_demonstrations(5000, 0)}
    assert tasks.batch(8, 3) == tasks.batch(8, 3) != tasks.batch(8, 4)


def test_exact_match_reward():
    task = ReverseTasks(ReverseEnv(), seed=0).evaluation[0]
    assert task.reward(task.answer) == 1 and task.reward(task.answer + " ") == 0
    assert task.question == f"Reverse: {task.answer[::-1]}"
