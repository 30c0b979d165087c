"""Several tenants use one service at once, and one sends values that cannot be computed with."""

import json
from typing import Any

import numpy as np
import psutil
import pytest
import tinker
from tinker import types

from tests.conftest import Service, run_cli
from tests.service.test_sdk import datum, logprobs_of

COUNT = 4


def policy(service: Service) -> dict[str, Any]:
    status = json.loads(run_cli("status", "--name", service.name, "--json").stdout)
    assert status["transfer"] == "shm"
    return status["groups"]["policy"]


def test_ranks_and_engines_have_the_environment_of_the_config(service: Service):
    (rank,) = (psutil.Process(pid) for pid in policy(service)["pids"])
    assert rank.environ()["A_VARIABLE"] == "of the config"
    engines = [p for p in psutil.process_iter(["name"]) if "EngineActor" in p.info["name"]]
    assert engines and all(p.environ()["A_VARIABLE"] == "of the config" for p in engines)


def test_concurrent_tenants_get_the_same_results_as_alone(service: Service):
    """The ranks get the calls of all tenants together, then each call alone.

    Nothing is trained between the two.
    """
    with tinker.ServiceClient() as client:
        models = [
            client.create_lora_training_client("tiny", rank=2 ** (i + 1), seed=i).result()
            for i in range(COUNT)
        ]
        data = [
            [datum(n, seed=10 * i + n, weights=[1.0] * n) for n in (5, 12 + i)]
            for i in range(COUNT)
        ]
        for model, rows in zip(models, data, strict=True):
            model.forward_backward(rows, "cross_entropy").result()
            model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        together = [
            model.forward(rows, "cross_entropy") for model, rows in zip(models, data, strict=True)
        ]
        outputs = [logprobs_of(future.result()) for future in together]
        for model, rows, output in zip(models, data, outputs, strict=True):
            alone = model.forward(rows, "cross_entropy").result()
            np.testing.assert_allclose(
                np.concatenate(output), np.concatenate(logprobs_of(alone)), atol=1e-5
            )
            assert alone.metrics["entropy:sum"] > 0


def test_a_loss_that_is_not_finite_is_refused_and_the_model_remains_usable(service: Service):
    before = policy(service)["refused"]
    with tinker.ServiceClient() as client:
        model, other = (
            client.create_lora_training_client("tiny", rank=4, seed=i).result() for i in range(2)
        )
        fields = {"logprobs": [-5.0] * 9, "advantages": [1.0] * 9}
        good = [datum(9, seed=1, **fields), datum(9, seed=2, **fields)]
        bad = [good[0], datum(9, seed=2, **(fields | {"logprobs": [-5.0] * 8 + [-1e6]}))]
        beside = other.forward_backward(good, "importance_sampling")
        with pytest.raises(
            Exception,
            match="datum 1: loss importance_sampling or its gradient is not finite at token 8",
        ):
            model.forward_backward(bad, "importance_sampling").result()
        assert beside.result().metrics["loss:sum"] != 0
        with pytest.raises(Exception, match="not finite"):
            model.optim_step(types.AdamParams()).result()
        model.forward_backward(good, "importance_sampling").result()
        assert (
            model.optim_step(types.AdamParams(learning_rate=1e-3))
            .result()
            .metrics["skyrl.ai/grad_norm"]
            > 0
        )
        after = policy(service)
        assert after["refused"] > before
        assert after["paths"] | {"optimizers": ""} == {
            "attention": "by blocks",
            "head": "in place",
            "optimizers": "",
        }
        assert "FlatAdamW" in after["paths"]["optimizers"]
        found = run_cli("doctor", "--name", service.name).stdout.replace("\n", " ")
        assert f"policy of {service.name} (1 ranks) computes with attention: by blocks" in found
        assert f"weights of {service.name} reach engines by shm" in found
