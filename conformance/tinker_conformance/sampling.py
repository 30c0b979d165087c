"""Samples come from the weights that were asked for, by the parameters that were asked for."""

from collections import Counter
from typing import Any

import numpy as np
from tinker import types

from tinker_conformance.checks import Skipped, check, expect
from tinker_conformance.server import (
    FAR,
    Server,
    Values,
    data_of,
    logprobs_in,
    loss_in,
    rows,
    tensor,
)

DRAWS = 256
LEAST_SPREAD = 1e-3  # of logprobs, where one token is almost certain


def _prompt(seed: int = 0) -> list[int]:
    return rows(seed, 1)[0]


def _sampler(server: Server, model: Any) -> Any:
    return server.got(model.save_weights_and_get_sampling_client())


def _draw(server: Server, sampler: Any, num_samples: int = 1, seed: int = 1, **params: Any) -> Any:
    given = types.SamplingParams(**{"max_tokens": 6, "seed": seed, **params})
    prompt = types.ModelInput.from_ints(_prompt())
    return server.got(sampler.sample(prompt, num_samples, given)).sequences


@check(
    "sampling",
    "A sampler keeps its weights while the model trains on",
)
def samplers_are_pinned(server: Server) -> None:
    alpha, model, row = server.alpha, server.model(), _prompt(9)
    first = _sampler(server, model)
    before = server.sampler_scores(first, row)
    server.train(model, rows(0))
    server.plain_step(model, alpha)
    second = server.sampler_scores(_sampler(server, model), row)
    server.same(
        server.sampler_scores(first, row), before, "the older sampler answers otherwise now", 1e-4
    )
    expect(float(np.abs(second - before).max()) > 1e-4, "the new sampler has the old weights")


@check(
    "sampling",
    "compute_logprobs agrees with forward",
)
def prompt_logprobs_agree(server: Server) -> None:
    alpha, model, row = server.alpha, server.model(), _prompt()
    server.train(model, rows(0))
    server.plain_step(model, alpha)
    sampler = _sampler(server, model)
    found = server.sampler_scores(sampler, row)
    server.same(found, server.score(model, [row]), "prompt logprobs differ from forward")
    whole = server.got(sampler.compute_logprobs(types.ModelInput.from_ints(row)))
    expect(
        len(whole) == len(row) and whole[0] is None,
        f"compute_logprobs returns {len(whole)} values for {len(row)} tokens; the first is None",
    )


@check(
    "sampling",
    "Logprobs of sampled tokens agree with forward",
)
def sample_logprobs_agree(server: Server) -> None:
    model, prompt = server.model(), _prompt()
    (one,) = _draw(server, _sampler(server, model))
    row = [*prompt, *one.tokens]
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(row[:-1]),
        loss_fn_inputs={
            "target_tokens": tensor(row[1:], "int64"),
            "weights": tensor([1.0] * (len(row) - 1)),
        },
    )
    wanted = logprobs_in(server.got(model.forward([datum], "cross_entropy")))
    found = np.asarray(one.logprobs, np.float64)
    server.same(found, wanted[-len(one.tokens) :], "logprobs of samples differ from forward")


@check(
    "sampling",
    "The same seed draws the same tokens, another seed others",
)
def seeds(server: Server) -> None:
    sampler = _sampler(server, server.model())
    drawn = [[tuple(s.tokens) for s in _draw(server, sampler, 4, seed)] for seed in (1, 1, 2)]
    expect(drawn[0] == drawn[1], "one seed drew two answers")
    expect(drawn[0] != drawn[2], "two seeds drew the same answers: the seed is dropped")
    expect(len(set(drawn[0])) > 1, "all of num_samples are equal at temperature 1")


@check(
    "sampling",
    "num_samples and max_tokens are honoured",
)
def counts(server: Server) -> None:
    found = _draw(server, _sampler(server, server.model()), 5, max_tokens=3)
    expect(len(found) == 5, f"{len(found)} answers for num_samples=5")
    expect(all(len(one.tokens) <= 3 for one in found), "an answer is longer than max_tokens")


@check(
    "sampling",
    "An answer ends with a stop token, and says so",
)
def stops(server: Server) -> None:
    sampler = _sampler(server, server.model())
    (whole,) = _draw(server, sampler)
    expect(len(whole.tokens) > 1, "the answer has one token; nothing to stop")
    token = whole.tokens[1]
    (cut,) = _draw(server, sampler, stop=[token])
    at = list(whole.tokens).index(token)
    expect(list(cut.tokens) == list(whole.tokens[: at + 1]), f"{cut.tokens} with stop=[{token}]")
    expect(cut.stop_reason == "stop", f"stop_reason is {cut.stop_reason}")


@check(
    "sampling",
    "top_k=1, a tiny top_p and temperature 0 draw the likeliest token",
)
def greedy_ways(server: Server) -> None:
    sampler = _sampler(server, server.model())
    ways: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}]
    found = [tuple(_draw(server, sampler, seed=n, **way)[0].tokens) for n, way in enumerate(ways)]
    expect(len(set(found)) == 1, f"temperature 0, top_k 1, top_p 1e-6 draw {found}")
    many = _draw(server, sampler, DRAWS, max_tokens=1)
    likeliest = max(many, key=lambda one: one.logprobs[0])
    (first,) = _draw(server, sampler, max_tokens=1, temperature=0.0)
    expect(
        first.logprobs[0] >= likeliest.logprobs[0] - 1e-4, "a likelier token than the greedy one"
    )


@check(
    "sampling",
    "Tokens are drawn as often as their logprobs say, also at another temperature",
)
def frequencies(server: Server) -> None:
    model = server.model()
    sampler = _sampler(server, model)
    plain = _draw(server, sampler, DRAWS, max_tokens=1)
    logprobs = {one.tokens[0]: float(one.logprobs[0]) for one in plain}
    drawn = Counter(one.tokens[0] for one in plain)
    for token, count in drawn.items():
        p = float(np.exp(logprobs[token]))
        spread = float(np.sqrt(DRAWS * p * (1 - p))) + 1
        expect(
            abs(count - DRAWS * p) < 6 * spread,
            f"token {token} of probability {p:.3f} was drawn {count} times of {DRAWS}",
        )
    # The mean logprob of draws rises as the temperature falls. `forward` scores them, because most
    # of them did not occur at temperature 1 where the vocabulary is large.
    values: list[Values] = []
    for temperature in (0.1, 2.0):
        found = _draw(server, sampler, DRAWS, max_tokens=1, temperature=temperature)
        tokens = [one.tokens[0] for one in found]
        known = sorted(set(tokens))
        scores = server.score(model, [[*_prompt(), token] for token in known])
        of = dict(zip(known, scores.reshape(len(known), -1)[:, -1], strict=True))
        values.append(np.asarray([of[token] for token in tokens]))
    cold, hot = values
    noise = 3 * float(np.sqrt((cold.var() + hot.var()) / DRAWS))
    # Where logprobs have a small variance v, means differ by v·(1/t₁ − 1/t₂) at two temperatures.
    if 9.5 * float(hot.var()) < 2 * noise or hot.std() < LEAST_SPREAD:
        raise Skipped("the tokens are almost equally likely, or one is almost certain")
    expect(
        float(cold.mean() - hot.mean()) > noise,
        f"temperature 0.1 and 2 draw alike: mean logprobs {cold.mean():.3f} and {hot.mean():.3f}",
    )


@check(
    "sampling",
    "A checkpoint's sampler answers from that checkpoint",
)
def samplers_of_paths(server: Server) -> None:
    alpha, model, row = server.alpha, server.model(), _prompt(9)
    server.train(model, rows(0))
    server.plain_step(model, FAR * alpha)
    path = server.saved(model.save_weights_for_sampler("conformance-four"))
    wanted = server.score(model, [row])
    server.train(model, rows(6))
    server.plain_step(model, alpha)
    sampler = server.got(server.service.create_sampling_client(model_path=path))
    server.same(server.sampler_scores(sampler, row), wanted, "the path's sampler has other weights")


@check(
    "sampling",
    "A sampler of the base model is not touched by training",
)
def base_is_untouched(server: Server) -> None:
    alpha, row = server.alpha, _prompt(9)
    base = server.offered(
        lambda: server.service.create_sampling_client(base_model=server.base_model),
        "a sampler of the base model",
    )
    before = server.sampler_scores(base, row)
    model = server.model()
    server.same(server.score(model, [row]), before, "a new adapter differs from the base model")
    server.train(model, rows(0))
    server.plain_step(model, alpha)
    server.sampler_scores(_sampler(server, model), row)
    server.same(server.sampler_scores(base, row), before, "training changed the base model", 1e-4)


@check(
    "sampling",
    "A loss of samples on policy has ratios of 1",
)
def on_policy_ratio(server: Server) -> None:
    model = server.model()
    row = _prompt()
    found = server.sampler_scores(_sampler(server, model), row)
    ones = np.ones((1, len(found)))
    data = data_of([row], logprobs=found[None], advantages=ones)
    output = server.got(model.forward_backward(data, "importance_sampling"))
    loss = loss_in(output)
    expect(
        abs(loss + len(found)) < server.tolerance * len(found),
        f"loss:sum is {loss:.4f} for {len(found)} tokens on policy",
    )
