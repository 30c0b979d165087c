"""Bad input is refused by name, and harms neither the model nor the server."""

from collections.abc import Callable
from typing import Any

import numpy as np
from tinker import types

from tinker_conformance.checks import check, expect
from tinker_conformance.server import ROW_TOKENS, ROWS, Server, data_of, rows, tensor


def _bad_datum(**changed: Any) -> Any:
    (datum,) = data_of(rows(0, 1))
    inputs = {**datum.loss_fn_inputs, **changed}
    return types.Datum(model_input=datum.model_input, loss_fn_inputs=inputs)


def _refused_and_harmless(server: Server, bad: Callable[[Any], Any], what: str) -> None:
    """Refuse a call between a good one and its step; the step is as without it."""
    wanted = server.moved(lambda m: server.train(m, rows(0)), server.alpha)

    def with_bad(model: Any) -> None:
        server.train(model, rows(0))
        server.refused(lambda: bad(model), what)

    model, probe = server.model(), rows(9)
    before = server.score(model, probe)
    with_bad(model)
    try:
        server.plain_step(model, server.alpha)
    except Exception:
        # A server may refuse the step too; the model must then train on from where it was.
        server.train(model, rows(0))
        server.plain_step(model, server.alpha)
    found = server.score(model, probe) - before
    server.same(found, wanted, f"after {what}, the step differs")


@check(
    "hostile",
    "Targets of another length than the input are refused, and leave the gradient as it was",
)
def short_targets(server: Server) -> None:
    bad = _bad_datum(target_tokens=tensor([20, 21], "int64"), weights=tensor([1.0, 1.0]))
    call = lambda m: m.forward_backward([bad], "cross_entropy")  # noqa: E731
    _refused_and_harmless(server, call, "two targets for twelve tokens")


@check(
    "hostile",
    "A weight that is not a number is refused, and leaves the gradient as it was",
)
def weights_that_are_not_numbers(server: Server) -> None:
    bad = _bad_datum(weights=tensor([float("nan")] * ROW_TOKENS))
    call = lambda m: m.forward_backward([bad], "cross_entropy")  # noqa: E731
    _refused_and_harmless(server, call, "a weight of NaN")


@check(
    "hostile",
    "An infinite loss is refused, and leaves the gradient as it was",
)
def infinite_losses(server: Server) -> None:
    q = np.full((ROWS, ROW_TOKENS), -1e30)
    data = data_of(rows(0), logprobs=q, advantages=np.ones((ROWS, ROW_TOKENS)))
    call = lambda m: m.forward_backward(data, "importance_sampling")  # noqa: E731
    _refused_and_harmless(server, call, "a ratio that overflows")


@check(
    "hostile",
    "A token outside of the vocabulary is refused",
)
def unknown_tokens(server: Server) -> None:
    model = server.model()
    row = [*rows(0, 1)[0][:-2], 10**9, 20]
    server.refused(lambda: model.forward(data_of([row]), "cross_entropy"), "token 1,000,000,000")
    server.refused(
        lambda: model.forward(data_of([[*rows(0, 1)[0][:-1], -5]]), "cross_entropy"), "target -5"
    )
    server.score(model, rows(0))


@check(
    "hostile",
    "An unknown loss, and an unknown option of a known one, are refused by name",
)
def unknown_losses(server: Server) -> None:
    model, values = server.model(), np.ones((ROWS, ROW_TOKENS))
    server.refused(lambda: model.forward_backward(data_of(rows(0)), "no_such_loss"), "no_such_loss")
    data = data_of(rows(0), logprobs=-values, advantages=values)
    what = "the option clip_low_treshold"
    message = server.refused(
        lambda: model.forward_backward(data, "ppo", {"clip_low_treshold": 0.9}), what
    )
    expect("treshold" in message, f"the refusal does not name the option: {message[:160]}")


@check(
    "hostile",
    "Numbers of Adam that are not finite or negative are refused, and change no weight",
)
def bad_steps(server: Server) -> None:
    model = server.model()
    server.train(model, rows(0))
    before = server.score(model, rows(9))
    for fields in (
        {"learning_rate": float("nan")},
        {"learning_rate": float("inf")},
        {"beta1": 1.5},
    ):
        given = types.AdamParams(**fields)
        server.refused(lambda given=given: model.optim_step(given), f"AdamParams({fields})")
    server.same(server.score(model, rows(9)), before, "a refused step changed the weights", 1e-4)


@check(
    "hostile",
    "Sampling parameters outside of their range are refused",
)
def bad_samples(server: Server) -> None:
    sampler = server.got(server.model().save_weights_and_get_sampling_client())
    prompt = types.ModelInput.from_ints(rows(0, 1)[0])
    bad: tuple[dict[str, Any], ...] = (
        {"max_tokens": 4, "temperature": -1.0},
        {"max_tokens": 4, "top_p": 1.5},
        {"max_tokens": 10**9},
    )
    for fields in bad:
        params = types.SamplingParams(**fields)
        server.refused(lambda params=params: sampler.sample(prompt, 1, params), str(fields))
    server.got(sampler.sample(prompt, 1, types.SamplingParams(max_tokens=2)))


@check(
    "hostile",
    "Names of checkpoints cannot leave their folder",
)
def names_that_are_paths(server: Server) -> None:
    model = server.model()
    for name in ("../../outside", "a/b", "/tmp/x", "a\x00b", "x" * 5000):
        server.refused(lambda name=name: model.save_state(name), f"the name {name[:20]!r}")
    made = server.service.create_training_client_from_state
    server.refused(lambda: made("tinker://../weights/etc"), "tinker://../weights/etc")


@check(
    "hostile",
    "Unknown models, samplers and checkpoints are refused by name",
)
def unknown_things(server: Server) -> None:
    make = server.service
    path = "tinker://no-such-run/weights/none"
    server.refused(lambda: make.create_training_client_from_state(path), path)
    server.refused(
        lambda: make.create_lora_training_client("no/such-model", rank=8), "no/such-model"
    )


@check(
    "hostile",
    "A bad request of one model does not delay or fail another one",
)
def others_go_on(server: Server) -> None:
    bad, good = server.model(), server.model(seed=2)
    wanted = server.score(good, rows(0))
    broken = [_bad_datum(weights=tensor([float("nan")] * ROW_TOKENS))]
    failing = lambda: bad.forward_backward(broken, "cross_entropy")  # noqa: E731
    future = good.forward(data_of(rows(0)), "cross_entropy")
    server.refused(failing, "a weight of NaN")
    server.got(future)
    server.same(server.score(good, rows(0)), wanted, "the other model answers otherwise")
