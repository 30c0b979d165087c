"""Waiting beside the computation is short, and models and keys do not slow each other."""

import time
from statistics import median
from typing import Any

from tinker_conformance.checks import Skipped, check, expect
from tinker_conformance.server import Server, data_of, rows

SMALL_S = 2.0  # for a call that computes nothing, beside a queue
NOISE_S = 0.25  # that no other key caused
FLOOD = 24
ARRIVED_S = 0.05  # the SDK sends the calls of a flood in the background
MODELS = 6
REQUESTS = 2  # of one call: submit it, and fetch its answer


def _seconds(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@check("load", "A call waits at most --latency beside its computation and the network")
def added_latency(server: Server) -> str:
    """Compare calls one after another with calls that wait together, whose waits overlap.

    The difference also has what a batch computes at once, so only the user knows its bound.
    """
    model, data = server.model(), data_of(rows(0, 1))

    def call() -> Any:
        return model.forward(data, "cross_entropy")

    for _ in range(3):
        server.got(call())
    # In turns, so that other load of the machine is in both.
    turns = [(_seconds(lambda: server.got(call())), _seconds(server.ask_health)) for _ in range(15)]
    alone, trip = (median(seconds) for seconds in zip(*turns, strict=True))
    together = median(
        _seconds(lambda: [server.got(one) for one in [call() for _ in range(16)]]) / 16
        for _ in range(3)
    )
    told = (
        f"{alone * 1e3:.0f} ms alone, {together * 1e3:.0f} ms each of 16 at a time, "
        f"{trip * 1e3:.0f} ms for an empty request"
    )
    if server.latency_s is not None:
        expect(alone - together - REQUESTS * trip <= server.latency_s, told)
    return told


@check("load", "Calls that compute nothing do not wait for a queue of training calls")
def small_calls_pass(server: Server) -> str:
    model, data = server.model(), data_of(rows(0) * 8)
    name, rest = server.got(model.get_info()).model_id, server.service.create_rest_client()
    server.got(rest.get_training_run(name))
    futures = [model.forward_backward(data, "cross_entropy") for _ in range(16)]
    waited = _seconds(lambda: server.got(rest.get_training_run(name)))
    for future in futures:
        server.got(future)
    told = f"{waited * 1e3:.0f} ms"
    expect(waited <= SMALL_S, f"{told} beside a queue of 16 calls")
    return told


@check("load", f"{MODELS} models that train at the same time are as each alone")
def many_models(server: Server) -> None:
    alpha, models = server.alpha, [server.model() for _ in range(MODELS)]
    before = server.score(models[0], rows(9))
    calls = [
        one.forward_backward(data_of(rows(n % 2)), "cross_entropy") for n, one in enumerate(models)
    ]
    for call in calls:
        server.got(call)
    for one in models:
        server.plain_step(one, alpha)
    found = [server.score(one, rows(9)) - before for one in models]
    wanted = [server.moved(lambda m, n=n: server.train(m, rows(n)), alpha) for n in (0, 1)]
    for number, moved in enumerate(found):
        server.same(moved, wanted[number % 2], f"model {number} differs from one alone")


@check("load", "A key with many calls does not delay another key's")
def fair_between_keys(server: Server) -> str:
    if server.second_api_key is None:
        raise Skipped("needs --second-api-key")
    other = server.with_key(server.second_api_key)
    try:
        return _flooded(server, other)
    finally:
        other.close()


def _flooded(server: Server, other: Server) -> str:
    """Return how long a call of the other key takes beside many of the first."""
    theirs, own = other.model(), server.model()
    small, large = data_of(rows(0, 1)), data_of(rows(0) * 8)

    def once() -> None:
        other.got(theirs.forward_backward(small, "cross_entropy"))

    once()
    alone = median(_seconds(once) for _ in range(5))
    began = time.perf_counter()
    flood = [own.forward_backward(large, "cross_entropy") for _ in range(FLOOD)]
    time.sleep(ARRIVED_S)
    beside = max(_seconds(once) for _ in range(3))
    for future in flood:
        server.got(future)
    whole = time.perf_counter() - began
    told = f"{beside:.2f} s beside {FLOOD} calls of {whole:.2f} s, {alone:.2f} s alone"
    expect(beside <= max(whole / 2, 4 * alone, NOISE_S), told)
    return told
