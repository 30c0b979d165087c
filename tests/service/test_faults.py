"""An unmodified SDK client trains while processes of the service are killed.

It sees no exception and the same numbers.
"""

import json
import random
import shutil
import threading
import time

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from bench import faults
from tests.conftest import Service, run_cli
from tests.service.test_sdk import datum


def healthy(service: Service, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if httpx.get(f"{service.url}/healthz", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline, "the service did not recover"
        time.sleep(0.1)


def trained(
    client: tinker.ServiceClient, steps: int, between=lambda step: None
) -> tuple[list[float], list[float]]:
    """Return losses and gradient norms of a short run. `between` is called inside each step."""
    model = client.create_lora_training_client("tiny", rank=4, seed=11).result()
    losses, norms = [], []
    for step in range(steps):
        first = model.forward_backward(
            [datum(9, seed=step), datum(4, seed=step + 100)], "cross_entropy"
        )
        between(step)
        second = model.forward_backward([datum(7, seed=step + 200)], "cross_entropy")
        stepped = model.optim_step(types.AdamParams(learning_rate=1e-2, eps=1e-8))
        losses += [first.result().metrics["loss:sum"], second.result().metrics["loss:sum"]]
        norms.append((stepped.result().metrics or {})["skyrl.ai/grad_norm"])
    return losses, norms


KINDS = ("rank", "controller", "vLLM process", "ingress replica", "group", "Serve proxy")


@pytest.mark.slow
def test_training_while_processes_are_killed_gives_the_same_numbers(service: Service):
    choice, killed = random.Random(3), []

    def kill(step: int) -> None:
        killed.append((KINDS[step], faults.kill(service.name, KINDS[step], choice)))

    with tinker.ServiceClient() as client:
        disturbed = trained(client, len(KINDS), kill)
        assert all(pids for _, pids in killed), killed
        healthy(service)
        assert trained(client, len(KINDS)) == disturbed


def test_every_operation_reaches_the_gradient_exactly_once(service: Service):
    """Each operation reaches the gradient exactly once.

    Operation i adds 2^i times the same gradient, so the binary digits of the norm show which ones
    reached it, and how often. A lost one leaves a 0, and a doubled one carries over.
    """
    count, choice = 12, random.Random(5)
    with tinker.ServiceClient() as client:
        model = client.create_lora_training_client("tiny", rank=4, seed=2).result()
        still = types.AdamParams(learning_rate=0.0)

        def norm(weights: list[float], disturb: bool) -> float:
            futures = []
            for i, weight in enumerate(weights):
                futures.append(
                    model.forward_backward(
                        [datum(6, seed=1, weights=[weight] * 6)], "cross_entropy"
                    )
                )
                if disturb and i % 4 == 1:
                    faults.kill(service.name, ("rank", "controller", "rank")[i // 4], choice)
                    time.sleep(choice.uniform(0, 1.5))
            for future in futures:
                future.result()
            return (model.optim_step(still).result().metrics or {})["skyrl.ai/grad_norm"]

        unit = norm([1.0], False)
        order = np.random.default_rng(0).permutation(count)
        witness = norm([float(2**i) for i in order], True) / unit
    assert witness == pytest.approx(2**count - 1, abs=0.05)
    healthy(service)


@pytest.mark.slow
def test_a_sample_outlives_its_engine(service: Service):
    """The engine dies while it samples. The restarted engine answers with the same seed."""
    params = types.SamplingParams(max_tokens=300, temperature=1.0, seed=5, stop=[])
    prompt = types.ModelInput.from_ints([5, 6, 7])
    with tinker.ServiceClient() as client:
        sampler = client.create_sampling_client(base_model="tiny").result()
        expected = sampler.sample(prompt, 2, params).result()
        future = sampler.sample(prompt, 2, params)
        time.sleep(0.5)
        assert faults.kill(service.name, "engine actor", random.Random(0))
        time.sleep(0.5)
        assert not future.done()  # the sample was running
        answer = future.result()
    assert [s.tokens for s in answer.sequences] == [s.tokens for s in expected.sequences]
    healthy(service)
    status = run_cli("status", "--name", service.name, "--json")
    assert status.returncode == 0
    (engine,) = json.loads(status.stdout)["engines"]
    assert engine["state"] == "HEALTHY" and engine["restarts"] > 0


def test_a_past_step_becomes_a_new_model(service: Service):
    adam = types.AdamParams(learning_rate=1e-2, eps=1e-8)
    probe = [datum(8, seed=1)]
    with tinker.ServiceClient() as client:
        model = client.create_lora_training_client("tiny", rank=4, seed=6).result()
        model_id = model.model_id
        seen = []
        for step in range(4):
            seen.append(
                model.forward(probe, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
            )
            model.forward_backward([datum(9, seed=step)], "cross_entropy").result()
            model.optim_step(adam).result()
        for step in (0, 2):
            fork = client.create_training_client_from_state_with_optimizer(
                f"tinker://{model_id}/steps/{step}"
            ).result()
            assert (
                fork.forward(probe, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
                == seen[step]
            )
        # It continues as the first one did, with the same moments.
        fork.forward_backward([datum(9, seed=2)], "cross_entropy").result()
        fork.optim_step(adam).result()
        assert (
            fork.forward(probe, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
            == seen[3]
        )
        with pytest.raises(Exception, match="is at step 4; use 0 to 4"):
            client.create_training_client_from_state(f"tinker://{model_id}/steps/9").result()
    listed = run_cli(
        "journal", "configs/cpu_tiny.yaml", f"journal.folder={service.journal}", "--model", model_id
    )
    assert (
        listed.returncode == 0
        and "OptimStep" in listed.stdout
        and f"tinker://{model_id}/steps/<0 to 4>" in listed.stdout
    )


def test_loaded_weights_are_kept_when_their_checkpoint_is_deleted(service: Service):
    probe = [datum(8, seed=1)]
    with tinker.ServiceClient() as client:
        model = client.create_lora_training_client("tiny", rank=4, seed=6).result()
        for step in range(2):
            model.forward_backward([datum(9, seed=step)], "cross_entropy").result()
            model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
            if step == 0:
                path = model.save_state("c").result().path
        model.load_state(path).result()
        expected = (
            model.forward(probe, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
        )
        shutil.rmtree(service.checkpoints / model.model_id.replace(":", "_"))
        assert faults.kill(service.name, "group", random.Random(0))
        assert (
            model.forward(probe, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
            == expected
        )
    healthy(service)


def test_a_second_service_on_the_same_journal_is_refused(service: Service):
    refused = run_cli(
        "serve",
        "configs/cpu_tiny.yaml",
        "name=other",
        "http.port=8999",
        f"journal.folder={service.journal}",
    )
    assert refused.returncode == 2
    assert (
        f"is in use by service '{service.name}'" in refused.stderr
        and "set another journal.folder" in refused.stderr
    )


def test_a_full_disk_pauses_and_resumes(service: Service):
    """Without the journal's folder, requests wait. They run when it is back."""
    hidden = service.journal.with_name("elsewhere")
    with tinker.ServiceClient() as client:
        model = client.create_lora_training_client("tiny", rank=2, seed=1).result()
        expected = model.forward([datum(5, seed=1)], "cross_entropy").result().metrics["loss:sum"]
        service.journal.rename(hidden)
        answers: list[float] = []

        def work() -> None:
            answers.append(
                model.forward([datum(5, seed=1)], "cross_entropy").result().metrics["loss:sum"]
            )

        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(3)
        reason = httpx.get(f"{service.url}/healthz").json()["reason"]
        assert "the journal cannot write" in reason and not answers
        assert not service.journal.exists()
        hidden.rename(service.journal)
        thread.join(60)
        assert answers == [expected]
    healthy(service)
