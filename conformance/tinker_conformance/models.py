"""Every base model that the server lists is served, to the sizes that it tells."""

from typing import Any

import numpy as np
from tinker import types

from tinker_conformance.checks import Skipped, check, expect
from tinker_conformance.server import Server, data_of, logprobs_in, rows, tensor

MOST = 8  # base models that are tried
LONGEST = 4096  # tokens of a row that the kit sends


def _listed(server: Server) -> list[Any]:
    found = server.service.get_server_capabilities().supported_models[:MOST]
    return [one for one in found if one.model_name]


@check("models", "Each base model that is listed can be trained and sampled")
def each_model_is_served(server: Server) -> str:
    names = [one.model_name for one in _listed(server)]
    for name in names:
        model = server.model(base_model=name)
        row = rows(0, 1)
        found = server.score(model, row)
        expect(bool(np.isfinite(found).all()), f"{name} has logprobs that are not finite")
        info = server.got(model.get_info())
        told = getattr(info.model_data, "model_name", None)
        expect(told == name, f"get_info tells {told} for {name}")
        sampler = server.got(model.save_weights_and_get_sampling_client())
        drawn = server.sampler_scores(sampler, row[0])
        server.same(drawn, found, f"the sampler of {name} has other weights")
    return f"{len(names)} models"


@check("models", "Two base models are not one model under two names")
def models_differ(server: Server) -> None:
    names = [one.model_name for one in _listed(server)]
    if len(names) < 2:
        raise Skipped("one base model is listed")
    found = [server.score(server.model(base_model=name), rows(0)) for name in names]
    for at, name in enumerate(names[1:], 1):
        off = float(np.abs(found[at] - found[0]).max())
        expect(off > 1e-4, f"{name} and {names[0]} have equal logprobs")


@check("models", "Adapters have the rank that was asked, 1 to 32")
def ranks(server: Server) -> None:
    alpha = server.alpha
    for rank in (1, 32):
        model = server.model(rank=rank)
        told = server.got(model.get_info()).lora_rank
        expect(told in (rank, None), f"lora_rank is {told}, and {rank} was asked")
        before = server.score(model, rows(9))
        server.train(model, rows(0))
        server.plain_step(model, alpha)
        moved = float(np.abs(server.score(model, rows(9)) - before).mean())
        expect(moved > 1e-5, f"a step of an adapter of rank {rank} moves nothing")


@check("models", "Rows may have max_context_length tokens, and no more")
def context_length(server: Server) -> str:
    longest = next(
        (one.max_context_length for one in _listed(server) if one.model_name == server.base_model),
        None,
    )
    if not longest or longest > LONGEST:
        raise Skipped(f"max_context_length is {longest}")
    model = server.model()
    row = (rows(0, 1)[0] * (longest // 12 + 2))[: longest + 2]
    found = server.got(model.forward([_row(row[: longest + 1])], "cross_entropy"))
    expect(len(logprobs_in(found)) == longest, f"not {longest} logprobs")
    call = lambda: model.forward([_row(row)], "cross_entropy")  # noqa: E731
    server.refused(call, f"a row of {longest + 1} tokens")
    server.got(model.forward(data_of(rows(0)), "cross_entropy"))
    return f"{longest} tokens"


def _row(row: list[int]) -> Any:
    inputs = {
        "target_tokens": tensor(row[1:], "int64"),
        "weights": tensor([1.0] * (len(row) - 1)),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs=inputs)
