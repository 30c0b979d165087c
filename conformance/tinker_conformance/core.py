"""Every call answers, in the shape that the SDK documents."""

from typing import Any

import numpy as np
from tinker import types

from tinker_conformance.checks import check, expect
from tinker_conformance.server import ROW_TOKENS, ROWS, Server, data_of, logprobs_in, loss_in, rows


@check(
    "core",
    "The capabilities list the model that is trained",
)
def capabilities(server: Server) -> None:
    names = [m.model_name for m in server.service.get_server_capabilities().supported_models]
    expect(server.base_model in names, f"{server.base_model} is not in {names}")


@check(
    "core",
    "get_info tells model, rank and tokenizer of a new adapter",
)
def info(server: Server) -> None:
    found = server.got(server.model(rank=8).get_info())
    expect(found.lora_rank == 8, f"lora_rank is {found.lora_rank}, and 8 was asked")
    expect(bool(found.model_data.model_name), "model_data.model_name is missing")


@check(
    "core",
    "forward returns one logprob for each target, none above 0",
)
def forward_shapes(server: Server) -> None:
    output = server.got(server.model().forward(data_of(rows(0)), "cross_entropy"))
    expect(len(output.loss_fn_outputs) == ROWS, f"{len(output.loss_fn_outputs)} outputs for 4 rows")
    values = logprobs_in(output)
    expect(values.shape == (ROWS * ROW_TOKENS,), f"{values.shape} logprobs for 4 rows of 12")
    expect(bool(np.isfinite(values).all() and (values <= 1e-6).all()), "logprobs above 0 or NaN")


@check(
    "core",
    "forward_backward returns logprobs and loss:sum; optim_step answers",
)
def training_call(server: Server) -> None:
    model = server.model()
    output = server.train(model, rows(0))
    expect("loss:sum" in output.metrics, f"the metrics have no loss:sum: {output.metrics}")
    expect(bool(np.isfinite(loss_in(output))), "loss:sum is not finite")
    expect(logprobs_in(output).shape == (ROWS * ROW_TOKENS,), "not one logprob for each target")
    server.step(model, learning_rate=1e-5)


@check(
    "core",
    "Outputs come in the order of the datums, whatever their lengths",
)
def order_of_rows(server: Server) -> None:
    model, three = server.model(), [rows(1, 1)[0], rows(2, 1)[0][:4], rows(3, 1)[0]]
    together = server.got(model.forward(_ragged(three), "cross_entropy")).loss_fn_outputs
    for number, row in enumerate(three):
        alone = server.got(model.forward(_ragged([row]), "cross_entropy"))
        found = np.asarray(together[number]["logprobs"].data)
        expect(len(found) == len(row) - 1, f"row {number} has {len(found)} logprobs")
        server.same(found, logprobs_in(alone), f"row {number} differs from itself alone")


def _ragged(rows: list[list[int]]) -> list[Any]:
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={
                "target_tokens": types.TensorData(
                    data=row[1:], dtype="int64", shape=[len(row) - 1]
                ),
                "weights": types.TensorData(
                    data=[1.0] * (len(row) - 1), dtype="float32", shape=[len(row) - 1]
                ),
            },
        )
        for row in rows
    ]


@check(
    "core",
    "The same row has the same logprobs alone and beside others",
)
def rows_are_apart(server: Server) -> None:
    model, all_rows = server.model(), rows(4, 8)
    together = server.score(model, all_rows).reshape(8, -1)
    for number in (0, 7):
        alone = server.score(model, all_rows[number : number + 1])
        server.same(together[number], alone, f"row {number} depends on the rows beside it")


@check(
    "core",
    "save_state answers tinker://<model>/weights/<name>, and the checkpoint is listed",
)
def checkpoint_is_listed(server: Server) -> None:
    model = server.model()
    path = server.saved(model.save_state("conformance-one"))
    parts = path.removeprefix("tinker://").split("/")
    expect(path.startswith("tinker://") and parts[1:] == ["weights", "conformance-one"], path)
    rest = server.service.create_rest_client()
    listed = server.got(rest.list_checkpoints(parts[0])).checkpoints
    expect(path in [one.tinker_path for one in listed], f"{path} is not in list_checkpoints")
    server.got(rest.delete_checkpoint_from_tinker_path(path))
    listed = server.got(rest.list_checkpoints(parts[0])).checkpoints
    expect(path not in [one.tinker_path for one in listed], f"{path} is listed after its deletion")


@check(
    "core",
    "The training run of a model is listed with its base model and rank",
)
def training_run(server: Server) -> None:
    model = server.model(rank=4)
    name = server.got(model.get_info()).model_id
    run = server.got(server.service.create_rest_client().get_training_run(name))
    expect(run.base_model == server.base_model, f"base_model is {run.base_model}")
    expect(run.is_lora and run.lora_rank == 4, f"lora_rank is {run.lora_rank}, and 4 was asked")


@check(
    "core",
    "A sampler of saved weights draws tokens with logprobs",
)
def sampler_draws(server: Server) -> None:
    sampler = server.got(server.model().save_weights_and_get_sampling_client())
    prompt = types.ModelInput.from_ints(rows(0)[0])
    params = types.SamplingParams(max_tokens=4, seed=1)
    (one,) = server.got(sampler.sample(prompt, 1, params)).sequences
    expect(1 <= len(one.tokens) <= 4, f"{len(one.tokens)} tokens with max_tokens=4")
    expect(len(one.logprobs or []) == len(one.tokens), "not one logprob for each token")
    expect(one.stop_reason in ("stop", "length"), f"stop_reason is {one.stop_reason}")
