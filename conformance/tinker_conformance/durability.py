"""Nothing that was answered is lost or done twice, also when the server is killed.

Kills need `--kill-command`: a shell command that kills the server, or a part of it, and returns
when it is started again or will be started by its supervisor.
"""

from typing import Any

import numpy as np

from tinker_conformance.checks import Skipped, check, expect
from tinker_conformance.repeating import repeating
from tinker_conformance.server import FAR, Server, data_of, rows


def _with_repeats(server: Server, *paths: str) -> None:
    """Compare a step of requests that are sent twice with a step of requests that are sent once."""

    def trained(model: Any) -> None:
        server.train(model, rows(0))

    wanted = server.moved(trained, server.alpha)
    with repeating(server.base_url, paths, server.timeout_s) as proxy:
        through = server.through(proxy.base_url)
        try:
            found = through.moved(trained, server.alpha)
        finally:
            through.renew()  # frees its models
            through.close()
    if not proxy.repeats:
        raise Skipped(f"this version of the SDK sends no {' or '.join(paths)}")
    server.same(found, wanted, f"a step differs when {' and '.join(paths)} are sent twice")


@check(
    "durability",
    "A request that is sent again is not done again",
)
def repeated_requests(server: Server) -> None:
    _with_repeats(server, "/forward_backward", "/optim_step")


@check(
    "durability",
    "A result can be asked for again",
)
def results_are_kept(server: Server) -> None:
    _with_repeats(server, "/retrieve_future")


def _trained(server: Server, model: Any, interrupt: Any = None) -> np.ndarray:
    """Train three steps, with an interruption between a gradient and its step."""
    for number in range(3):
        server.train(model, rows(number))
        if interrupt and number == 1:
            interrupt()
        server.plain_step(model, server.alpha)
    return server.score(model, rows(9))


@check(
    "durability",
    "Kill the server between forward_backward and optim_step: the step has the gradient",
)
def killed_with_a_gradient(server: Server) -> None:
    if server.kill_command is None:
        raise Skipped("needs --kill-command")
    expect(server.alpha > 0, "no step size")  # before models are made
    wanted = _trained(server, server.model())
    found = _trained(server, server.model(), server.kill)
    server.same(found, wanted, "weights after the kill differ", 1e-3)


@check(
    "durability",
    "Kill the server while a call is computed: its result arrives, once",
)
def killed_during_a_call(server: Server) -> None:
    if server.kill_command is None:
        raise Skipped("needs --kill-command")
    wanted = server.moved(lambda m: server.train(m, rows(0) * 8), server.alpha / 8)
    model = server.model()
    before = server.score(model, rows(9))
    future = model.forward_backward(data_of(rows(0) * 8), "cross_entropy")
    server.kill()
    server.got(future)
    server.plain_step(model, server.alpha / 8)
    found = server.score(model, rows(9)) - before
    server.same(found, wanted, "the call counts twice, or not at all")


@check(
    "durability",
    "Kill the server: samplers and checkpoints answer as before",
)
def killed_with_a_sampler(server: Server) -> None:
    if server.kill_command is None:
        raise Skipped("needs --kill-command")
    alpha, model, row = server.alpha, server.model(), rows(9, 1)[0]
    server.train(model, rows(0))
    server.plain_step(model, FAR * alpha)
    sampler = server.got(model.save_weights_and_get_sampling_client())
    path = server.saved(model.save_state("conformance-five"))
    wanted = server.score(model, [row])
    server.kill()
    found = server.sampler_scores(sampler, row)
    server.same(found, wanted, "the sampler has other weights")
    made = server.got(server.service.create_training_client_from_state(path))
    server.same(server.score(made, [row]), wanted, "the checkpoint has other weights")
