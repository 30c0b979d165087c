"""Losses and optimizer steps obey their formulas, seen through logprobs alone.

The reference is computed in float64 from what the server itself answers. Laws that hold for every
model replace a copy of it: a gradient is a sum over datums and calls; the change of one loss by the
gradient of another is symmetric; decay by the whole rate makes an adapter zero.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from tinker_conformance.checks import Failed, check, expect
from tinker_conformance.server import (
    EPS,
    MOVED,
    PROBE_ROWS,
    ROW_TOKENS,
    ROWS,
    Server,
    Values,
    data_of,
    logprobs_in,
    loss_in,
    rows,
)

DRAWN = np.random.default_rng(7)
WEIGHTS = [0.0, 0.0, 1.0, 0.5, -0.25, 2.0, 1.0, 0.0, 1.0, 1.0, 0.3, 1.0]
ADVANTAGES = DRAWN.normal(size=(ROWS, ROW_TOKENS)).round(3)
SHIFTS = DRAWN.uniform(-0.5, 0.5, (ROWS, ROW_TOKENS)).round(3)  # of p from the sampling logprobs
FIRST_RATE = 2e-5
SIZES = (30.0, 8.0, 2.0, 0.5)  # of steps along one line
SEEDS = 0.01  # by which adapters of two seeds differ at least, of their effect


@check(
    "numbers",
    "cross_entropy is the weighted sum of −logprob, not a mean",
)
def cross_entropy_is_a_sum(server: Server) -> None:
    output = server.train(server.model(), rows(0), WEIGHTS)
    expected = -float((np.tile(WEIGHTS, ROWS) * logprobs_in(output)).sum())
    _near(server, loss_in(output), expected, "cross_entropy")


def _near(server: Server, found: float, expected: float, name: str) -> None:
    expect(
        abs(found - expected) <= server.tolerance * max(1.0, abs(expected)),
        f"loss:sum of {name} is {found:.5g}, and its formula gives {expected:.5g}",
    )


def _policy_loss(server: Server, name: str, config: dict[str, Any] | None = None) -> Any:
    """Return the loss, logprobs p, and ratios exp(p − q) of an off-policy call."""
    model = server.model()
    p = server.score(model, rows(0))
    q = p.reshape(ROWS, -1) - SHIFTS
    data = data_of(rows(0), logprobs=q, advantages=ADVANTAGES)
    output = server.offered(lambda: model.forward_backward(data, name, config), name)
    return loss_in(output), p, np.exp(SHIFTS).ravel()


@check(
    "numbers",
    "importance_sampling is −Σ exp(p − q)·A",
)
def importance_sampling(server: Server) -> None:
    found, _, ratio = _policy_loss(server, "importance_sampling")
    _near(server, found, -float((ratio * ADVANTAGES.ravel()).sum()), "importance_sampling")


@check(
    "numbers",
    "ppo is −Σ min(r·A, clip(r, low, high)·A), and its thresholds are honoured",
)
def ppo(server: Server) -> None:
    for low, high in ((0.8, 1.2), (0.9, 1.1)):
        config = {"clip_low_threshold": low, "clip_high_threshold": high}
        found, _, ratio = _policy_loss(server, "ppo", config)
        a = ADVANTAGES.ravel()
        expected = -float(np.minimum(ratio * a, np.clip(ratio, low, high) * a).sum())
        _near(server, found, expected, f"ppo with {low} and {high}")


@check(
    "numbers",
    "cispo is −Σ clip(r, low, high)·A·p",
)
def cispo(server: Server) -> None:
    config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    found, p, ratio = _policy_loss(server, "cispo", config)
    expected = -float((np.clip(ratio, 0.8, 1.2) * ADVANTAGES.ravel() * p).sum())
    _near(server, found, expected, "cispo")


@check(
    "numbers",
    "dro is −Σ (p·A − ½·beta·(p − q)²)",
)
def dro(server: Server) -> None:
    found, p, _ = _policy_loss(server, "dro", {"beta": 0.1})
    a = ADVANTAGES.ravel()
    _near(server, found, -float((p * a - 0.05 * SHIFTS.ravel() ** 2).sum()), "dro")


@check(
    "numbers",
    "The gradient of two equal datums is twice that of one",
)
def gradient_is_a_sum(server: Server) -> None:
    twice = server.moved(lambda m: server.train(m, rows(0) * 2), server.alpha)
    once = server.moved(lambda m: server.train(m, rows(0)), 2 * server.alpha)
    server.same(twice, once, "a batch of [d, d] is no step of twice [d]")


@check(
    "numbers",
    "Calls add up until the step",
)
def calls_add_up(server: Server) -> None:
    def apart(model: Any) -> None:
        server.train(model, rows(0)[:2])
        server.train(model, rows(0)[2:])

    found = server.moved(apart, server.alpha)
    server.same(found, _whole(server), "two calls differ from one with the same datums")


def _whole(server: Server) -> Values:
    found = server.moved(lambda m: server.train(m, rows(0)), server.alpha)
    expect(float(np.abs(found).mean()) > MOVED / 30, "a step with a gradient moves nothing")
    return found


@check(
    "numbers",
    "A forward pass between forward_backward and step changes nothing",
)
def forward_keeps_gradients(server: Server) -> None:
    def between(model: Any) -> None:
        server.train(model, rows(0))
        server.score(model, rows(5))

    found = server.moved(between, server.alpha)
    server.same(found, _whole(server), "the forward pass changed the gradient")


@check(
    "numbers",
    "A step uses the gradient up: a second one without a call moves nothing",
)
def step_clears_gradients(server: Server) -> None:
    def stepped(model: Any) -> None:
        server.train(model, rows(0))
        server.plain_step(model, server.alpha)
        server.train(model, rows(0), [0.0] * ROW_TOKENS)

    found = server.moved(stepped, server.alpha)
    server.same(found, _whole(server), "the gradient was still there after the step")


@check(
    "numbers",
    "Weights scale the gradient; tokens of weight 0 have none",
)
def weights_scale(server: Server) -> None:
    half = server.moved(lambda m: server.train(m, rows(0), [0.5] * ROW_TOKENS), 2 * server.alpha)
    server.same(half, _whole(server), "weights of 0.5 do not halve the gradient")
    none = server.moved(lambda m: server.train(m, rows(0), [0.0] * ROW_TOKENS), server.alpha)
    expect(float(np.abs(none).max()) < 1e-5, "tokens of weight 0 move the model")


@check(
    "numbers",
    "Gradients are those of the losses: the change of one by the other's is symmetric",
)
def gradients_are_symmetric(server: Server) -> None:
    data, advantages = rows(0), 0.5 + ADVANTAGES / 2

    def change(of: str, alpha: float) -> float:
        model = server.model()
        p = server.score(model, data)
        if of == "policy":  # along the gradient of cross_entropy
            server.train(model, data)
        else:
            given = data_of(data, logprobs=p.reshape(ROWS, -1), advantages=advantages)
            server.got(model.forward_backward(given, "importance_sampling"))
        server.plain_step(model, alpha)
        moved = server.score(model, data) - p
        return -float(((advantages.ravel() if of == "policy" else 1.0) * moved).sum())

    def law(size: float) -> None:
        one, other = (change(of, size * server.alpha) for of in ("policy", "cross_entropy"))
        most = max(abs(one), abs(other))
        expect(most > 1e-4, "the two losses do not touch the same weights; no law can be tested")
        expect(
            abs(one - other) <= 3 * server.tolerance * most,
            f"the changes are {one:.4g} and {other:.4g}, and must be equal",
        )

    _at_some_size(law, 1.0, 0.1)


def _at_some_size(law: Callable[[float], None], *sizes: float) -> None:
    """Raise Failed unless a law of steps holds at one of these sizes, in usual steps.

    Large steps are not linear, and rounding hides small ones. How much depends on the model. What a
    wrong server does wrong depends on no size.
    """
    *others, last = sizes
    for size in others:
        with suppress(Failed):
            law(size)
            return
    law(last)


@check(
    "numbers",
    "learning_rate and eps are honoured",
)
def learning_rate_and_eps(server: Server) -> None:
    def step(rate: float, eps: float) -> Values:
        model, probe = server.model(), rows(9, PROBE_ROWS)
        before = server.score(model, probe)
        server.train(model, rows(0))
        server.plain_step(model, rate, eps=eps)
        return server.score(model, probe) - before

    def law(size: float) -> None:
        once = step(size * server.alpha, EPS)
        expect(float(np.abs(once).mean()) > MOVED / 30, "a step with a gradient moves nothing")
        half = step(2 * size * server.alpha, 4 * EPS)
        server.aligned(2 * half, once, "twice the rate with four times eps is not half the step")

    _at_some_size(law, *SIZES)


def _with_and_without_gradient(server: Server, **adam: float) -> tuple[Values, Values]:
    """Return how far a step with a gradient moves logprobs, and the next one without.

    Both go along the same line, so that they may be larger than the other steps.
    """
    model, probe = server.model(), rows(9, PROBE_ROWS)
    scores = [server.score(model, probe)]
    for weight in (1.0, 0.0):
        server.train(model, rows(0), [weight] * ROW_TOKENS)
        server.step(model, **adam)
        scores.append(server.score(model, probe))
    return scores[1] - scores[0], scores[2] - scores[1]


@check(
    "numbers",
    "beta1 is honoured: without a gradient, the next step is beta1 / (1 + beta1) of the last",
)
def beta1(server: Server) -> None:
    def law(size: float, value: float) -> None:
        rate = size * server.alpha * EPS
        first, second = _with_and_without_gradient(server, learning_rate=rate, beta1=value, eps=EPS)
        wanted = first * value / (1 + value)
        server.aligned(second, wanted, f"beta1={value} has another momentum")

    for value in (0.8, 0.4):
        _at_some_size(partial(law, value=value), *SIZES)


@check(
    "numbers",
    "beta2 is honoured: without a gradient and eps, a step grows by √((1 + beta2) / beta2)",
)
def beta2(server: Server) -> None:
    usual, momentum = _sign_rate(server), 0.8

    def law(size: float, value: float) -> None:
        first, second = _with_and_without_gradient(
            server, learning_rate=size * usual, beta1=momentum, beta2=value, eps=1e-30
        )
        grown = momentum / (1 + momentum) * np.sqrt((1 + value) / value)
        server.aligned(second, first * grown, f"beta2={value}: the second step is another")

    for value in (0.5, 0.2):
        _at_some_size(partial(law, value=value), *SIZES)


def _sign_rate(server: Server) -> float:
    """Return a learning rate at which Adam without an epsilon moves logprobs by about MOVED."""
    rate = FIRST_RATE
    for _ in range(4):
        first, _ = _with_and_without_gradient(server, learning_rate=rate, beta1=0.0, eps=1e-30)
        mean = float(np.abs(first).mean())
        if MOVED / 2 < mean < MOVED * 2:
            break
        rate *= min(1e3, MOVED / max(mean, 1e-9))
    return rate


@check(
    "numbers",
    "weight_decay is decoupled: a decay of 1 / learning_rate makes an adapter zero",
)
def weight_decay(server: Server) -> None:
    alpha, model, probe = server.alpha, server.model(), rows(9)
    start = server.score(model, probe)
    server.train(model, rows(0))
    server.plain_step(model, alpha)
    far = float(np.abs(server.score(model, probe) - start).mean())
    server.train(model, rows(0), [0.0] * ROW_TOKENS)
    server.step(model, learning_rate=0.1, beta1=0.0, beta2=0.0, eps=1.0, weight_decay=10.0)
    left = float(np.abs(server.score(model, probe) - start).mean())
    expect(left < 0.01 * far, f"the adapter still moves logprobs by {left:.2g} (before: {far:.2g})")


@check(
    "numbers",
    "grad_clip_norm bounds the norm of the whole gradient",
)
def clipping(server: Server) -> None:
    alpha = server.alpha

    def clipped(batch: list[list[int]], bound: float) -> Values:
        model = server.model()
        before = server.score(model, rows(9))
        server.train(model, batch)
        server.plain_step(model, 10 / bound * alpha, grad_clip_norm=bound)
        return server.score(model, rows(9)) - before

    one = clipped(rows(0), 1e-4)
    server.same(clipped(rows(0), 2e-4), one, "the step is not proportional to the bound")
    server.same(clipped(rows(0) * 2, 1e-4), one, "a clipped gradient still grows with the batch")


@check(
    "numbers",
    "A seed decides the first weights of an adapter",
)
def seed_decides(server: Server) -> None:
    whole = _whole(server)
    expect(not server.drops_seeds, "two adapters of one seed differ")
    again = _whole(server)
    server.same(again, whole, "two adapters of one seed differ")
    other = server.moved(lambda m: server.train(m, rows(0)), server.alpha, seed=2)
    # Two random adapters can be as near as a tolerance for bfloat16, but not as one to itself.
    noise, far = (
        float(np.linalg.norm(found - whole) / np.linalg.norm(whole)) for found in (again, other)
    )
    expect(far > 3 * noise + SEEDS, "adapters of two seeds are equal: the seed is dropped")


@check(
    "numbers",
    "Two models that train in turns are as each alone",
)
def models_are_apart(server: Server) -> None:
    alpha, one, other = server.alpha, server.model(), server.model(seed=2)
    before = server.score(one, rows(9))
    futures = [
        m.forward_backward(data_of(rows(n)), "cross_entropy") for n, m in ((0, one), (6, other))
    ]
    for future in futures:
        server.got(future)
    server.plain_step(other, alpha)
    server.plain_step(one, alpha)
    server.same(server.score(one, rows(9)) - before, _whole(server), "the other model moved it")


@check(
    "numbers",
    "A saved state restores the weights, also into a new model",
)
def state_is_restored(server: Server) -> None:
    alpha, model, probe = server.alpha, server.model(), rows(9)
    server.train(model, rows(0))
    server.plain_step(model, alpha)
    saved = server.score(model, probe)
    path = server.saved(model.save_state("conformance-two"))
    server.train(model, rows(6))
    server.plain_step(model, alpha)
    if float(np.abs(server.score(model, probe) - saved).mean()) < 1e-6:
        raise Failed("the step after the save moved nothing")
    server.got(model.load_state(path))
    server.same(server.score(model, probe), saved, "load_state does not restore the weights", 1e-4)
    made = server.got(server.service.create_training_client_from_state(path))
    server.same(server.score(made, probe), saved, "a model from the state differs", 1e-4)


@check(
    "numbers",
    "load_state_with_optimizer continues the momentum, load_state does not",
)
def optimizer_is_restored(server: Server) -> None:
    adam = {"learning_rate": server.alpha * 1e6, "beta1": 0.8, "eps": 1e6}
    model = server.model()
    server.train(model, rows(0))
    server.step(model, **adam)
    path = server.saved(model.save_state("conformance-three"))

    def next_step() -> float:
        before = server.score(model, rows(9))
        server.train(model, rows(0), [0.0] * ROW_TOKENS)
        server.step(model, **adam)
        return float(np.abs(server.score(model, rows(9)) - before).mean())

    own = next_step()
    server.got(model.load_state_with_optimizer(path))
    again = next_step()
    expect(
        abs(again - own) < 0.1 * own, f"the next step is {again:.2g}, and without a load {own:.2g}"
    )
    server.got(model.load_state(path))
    fresh = next_step()
    expect(fresh < 0.05 * own, "load_state keeps the momentum of the optimizer")
