"""Clients continue after a power cut or a stop, when `serve` runs on the same journal.

A power cut kills every process at once and loses all memory. This is the last test that uses the
service, because it restarts it.
"""

import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from bench import faults
from skyrl_actors.config.transfers import SHARED_MEMORY
from tests.conftest import Service, run_cli, start_service
from tests.service.test_sdk import datum, full_model, logprobs_of, tokens


@pytest.mark.slow
def test_a_power_cut_or_a_stop_changes_nothing(service: Service):
    adam = types.AdamParams(learning_rate=1e-2, eps=1e-8)
    prompt, greedy = (
        types.ModelInput.from_ints([5, 6, 7]),
        types.SamplingParams(max_tokens=8, temperature=0.0),
    )

    def run(
        client: tinker.ServiceClient, between=lambda step: None
    ) -> tuple[list[float], list[int]]:
        model = client.create_lora_training_client("tiny", rank=4, seed=4).result()
        losses = []
        for step in range(6):
            batch = model.forward_backward([datum(9, seed=step)], "cross_entropy")
            stepped = model.optim_step(adam)
            if step == 3:
                sampler = model.save_weights_and_get_sampling_client()
            between(step)
            losses.append(batch.result().metrics["loss:sum"])
            stepped.result()
        # It was materialized before the cut, only in shared memory, so it is rebuilt from the
        # journal.
        return losses, sampler.sample(prompt, 1, greedy).result().sequences[0].tokens

    def cut(step: int) -> None:
        if step == 4:
            sampled.wait(30)
            assert faults.power_cut(service.name) > 5
            threading.Thread(target=start_service, args=(service,), daemon=True).start()

    def stop(step: int) -> None:
        if step == 4:
            stopped = run_cli("stop", "--name", service.name)
            assert stopped.returncode == 0, stopped.stderr
            wider = ("engine.tensor_parallel=2", "policy.num_ranks=2", "critic.num_ranks=2")
            threading.Thread(
                target=start_service, args=(service, "transfer.type=gloo", *wider), daemon=True
            ).start()

    sampled = threading.Event()
    with tinker.ServiceClient() as client:
        expected = run(client)
        threading.Timer(1.0, sampled.set).start()
        started = time.monotonic()
        assert run(client, cut) == expected
        print(f"the client continued after {time.monotonic() - started:.0f} s")
        assert run(client, stop) == expected
        full_weights_are_written_when_they_are_needed(
            client, service.url, SHARED_MEMORY / service.name
        )


def full_weights_are_written_when_they_are_needed(
    client: tinker.ServiceClient, url: str, folder: Path
) -> None:
    """Gloo sends a version directly from the live weights.

    A version that was not written is computed again from the journal.
    """
    model, row = full_model(client, "policy"), tokens(20, seed=12)
    data = [datum(19, seed=12, weights=[1.0] * 19)]

    def step() -> np.ndarray:
        model.forward_backward(data, "cross_entropy")
        model.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        return logprobs_of(model.forward(data, "cross_entropy").result())[0]

    def equals(sampler: tinker.SamplingClient, expected: np.ndarray) -> None:
        values = sampler.compute_logprobs(types.ModelInput.from_ints(row)).result()
        np.testing.assert_allclose(np.asarray(values[1:], np.float64), expected, atol=1e-4)

    def written() -> set[str]:
        return {file.name for file in folder.glob("*") if file.is_file()}

    before, first = written(), step()
    used = model.save_weights_and_get_sampling_client().result()
    equals(used, first)
    second = step()
    assert written() == before  # it was sampled, and no sample of it is running
    waiting = model.save_weights_and_get_sampling_client().result()
    third = step()
    assert len(written() - before) == 1  # no engine had it yet
    equals(waiting, second)
    equals(used, first)
    assert len(written() - before) == 2
    last = model.save_weights_and_get_sampling_client().result()
    equals(last, third)
    step()
    # A version that was not written can be computed again while its model exists.
    unloaded = httpx.post(
        f"{url}/api/v1/unload_model",
        json={"model_id": model.model_id},
        headers={"X-Api-Key": "tml-test"},
    )
    assert unloaded.status_code == 200
    deadline = time.monotonic() + 60
    while len(written() - before) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    equals(last, third)
    assert float(np.abs(first - third).max()) > 0.001


@pytest.mark.slow
def test_with_keys_samples_without_a_seed_differ_and_a_retry_is_equal(service: Service):
    """The service runs with keys, so ids end in the mark of the key's owner."""
    assert run_cli("stop", "--name", service.name).returncode == 0
    start_service(service, "http.api_keys=[ann=tml-test]")
    body = {
        "prompt": {"chunks": [{"tokens": [40, 7, 99]}]},
        "sampling_params": {"max_tokens": 12, "temperature": 1.0},
    }
    with httpx.Client(
        base_url=f"{service.url}/api/v1", headers={"X-API-Key": "tml-test"}, timeout=60
    ) as http:

        def resolved(path: str, **fields: object) -> dict:
            asked = http.post(path, json=fields).json()
            while (
                answer := http.post("/retrieve_future", json={"request_id": asked["request_id"]})
            ).status_code == 408:
                pass
            return answer.json()

        session = http.post("/create_session", json={}).json()["session_id"]
        fields = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        assert http.post("/create_sampling_session", json=fields).status_code == 200
        sampler = f"{session}:sample:0"

        def sampled(seq_id: int) -> list[tuple[int, ...]]:
            found = resolved(
                "/asample", sampling_session_id=sampler, seq_id=seq_id, num_samples=2, **body
            )
            return [tuple(one["tokens"]) for one in found["sequences"]]

        found = [sampled(seq_id) for seq_id in range(32)]
        assert [sampled(seq_id) for seq_id in (0, 31)] == [found[0], found[31]]
        drawn = [tokens for pair in found for tokens in pair]
        openai = {
            "model": "tiny",
            "prompt": [[40, 7, 99]] * 4,
            "n": 4,
            "max_tokens": 12,
            "logprobs": 0,
        }
        answer = httpx.post(
            f"{service.url}/v1/completions",
            json=openai,
            headers={"X-API-Key": "tml-test"},
            timeout=60,
        ).json()
        numbers = [tuple(choice["logprobs"]["token_logprobs"]) for choice in answer["choices"]]
    # Short samples, which end at once, can be equal by chance.
    assert (
        len({tokens for tokens in drawn if len(tokens) == 12})
        == sum(len(tokens) == 12 for tokens in drawn)
        > 32
    )
    assert len(set(numbers)) >= len(numbers) - 1
