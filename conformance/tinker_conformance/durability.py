"""Nothing that was answered is lost or done twice, also when the server is killed.

Kills need `--kill-command`: a shell command that kills the server, or a part of it, and returns
when it is started again or will be started by its supervisor.
"""

from typing import Any

import httpx
import numpy as np

from tinker_conformance.checks import Failed, Skipped, check, expect
from tinker_conformance.server import FAR, Server, data_of, rows


class Wire:
    """Calls without the SDK, to repeat a request as a client does whose connection broke."""

    def __init__(self, server: Server):
        self._server = server
        headers = {"X-API-Key": server.api_key}
        base_url = f"{server.base_url}/api/v1"
        self._http = httpx.Client(base_url=base_url, headers=headers, timeout=server.timeout_s)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._http.post(path, json=body)
        if answer.status_code in (404, 405, 415, 422):
            raise Skipped(f"{path} takes no JSON: {answer.status_code}")
        if not answer.is_success:
            raise Failed(f"{path} answers {answer.status_code}: {answer.text[:200]}")
        return answer.json()

    def result(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Poll until a request has its result."""
        while True:
            found = self._http.post("/retrieve_future", json={"request_id": answer["request_id"]})
            if found.status_code == 200 and found.json().get("type") != "try_again":
                return found.json()
            if found.status_code not in (200, 408):
                raise Failed(f"retrieve_future answers {found.status_code}: {found.text[:200]}")

    def model(self) -> str:
        """Create a session and an adapter; return the name of the model."""
        given = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", "type": "create_session"}
        session = self.post("/create_session", given)["session_id"]
        asked = {
            "type": "create_model",
            "session_id": session,
            "model_seq_id": 0,
            "base_model": self._server.base_model,
            "lora_config": {"rank": 8, "seed": 1},
        }
        return self.result(self.post("/create_model", asked))["model_id"]


def _step_of(model: str, seq: int, rate: float) -> dict[str, Any]:
    adam = {"learning_rate": rate, "beta1": 0.0, "beta2": 0.95, "eps": 1e6, "weight_decay": 0.0}
    return {"model_id": model, "seq_id": seq, "adam_params": adam}


def _call_of(model: str, seq: int) -> dict[str, Any]:
    data: list[dict[str, Any]] = []
    for row in rows(0):
        chunks = [{"type": "encoded_text", "tokens": row[:-1]}]
        inputs = {
            "target_tokens": {"data": row[1:], "dtype": "int64", "shape": [len(row) - 1]},
            "weights": {
                "data": [1.0] * (len(row) - 1),
                "dtype": "float32",
                "shape": [len(row) - 1],
            },
        }
        data.append({"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs})
    given = {"data": data, "loss_fn": "cross_entropy"}
    return {"model_id": model, "seq_id": seq, "forward_backward_input": given}


def _loss(answer: dict[str, Any]) -> float:
    if "loss:sum" in answer["metrics"]:
        return float(answer["metrics"]["loss:sum"])
    return float(sum(sum(one["elementwise_loss"]["data"]) for one in answer["loss_fn_outputs"]))


@check(
    "durability",
    "A request that is sent again is not done again",
)
def repeated_requests(server: Server) -> None:
    losses = []
    for repeats in (1, 2):
        wire = Wire(server)
        model, rate = wire.model(), server.alpha * 1e6
        for path, body in (
            ("/forward_backward", _call_of(model, 1)),
            ("/optim_step", _step_of(model, 2, rate)),
        ):
            answers = [wire.post(path, body) for _ in range(repeats)]
            wire.result(answers[-1])
        losses.append(_loss(wire.result(wire.post("/forward_backward", _call_of(model, 3)))))
    off = abs(losses[1] - losses[0]) / abs(losses[0])
    expect(
        off < 1e-4, f"loss after one step {losses[0]:.5g}, with repeated requests {losses[1]:.5g}"
    )


@check(
    "durability",
    "A result can be asked for again",
)
def results_are_kept(server: Server) -> None:
    wire = Wire(server)
    model = wire.model()
    asked = wire.post("/forward_backward", _call_of(model, 1))
    first, second = wire.result(asked), wire.result(asked)
    expect(first == second, "the second answer differs from the first")


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
    model, row = server.model(), rows(9, 1)[0]
    server.train(model, rows(0))
    server.plain_step(model, FAR * server.alpha)
    sampler = server.got(model.save_weights_and_get_sampling_client())
    path = server.got(model.save_state("conformance-five")).path
    wanted = server.score(model, [row])
    server.kill()
    found = server.sampler_scores(sampler, row)
    server.same(found, wanted, "the sampler has other weights")
    made = server.got(server.service.create_training_client_from_state(path))
    server.same(server.score(made, [row]), wanted, "the checkpoint has other weights")
