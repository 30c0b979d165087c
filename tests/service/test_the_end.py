"""The machine dies: every process at once, and all that lay in memory; or the service is stopped. `serve` on the same journal, and clients go on.

The last test that uses the service, as it starts it anew.
"""

import threading
import time

import tinker
from tinker import types

from bench import faults
from tests.conftest import Service, run_cli, start_service
from tests.service.test_sdk import datum


def test_a_power_cut_changes_nothing_and_a_stop_neither(service: Service):
    adam = types.AdamParams(learning_rate=1e-2, eps=1e-8)
    prompt, greedy = types.ModelInput.from_ints([5, 6, 7]), types.SamplingParams(max_tokens=8, temperature=0.0)

    def run(client: tinker.ServiceClient, between=lambda step: None) -> tuple[list[float], list[int]]:
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
        # Frozen before the cut, in shared memory only: it is rebuilt from the journal.
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
            threading.Thread(target=start_service, args=(service,), daemon=True).start()

    sampled = threading.Event()
    with tinker.ServiceClient() as client:
        expected = run(client)
        threading.Timer(1.0, sampled.set).start()
        started = time.monotonic()
        assert run(client, cut) == expected
        print(f"the client went on after {time.monotonic() - started:.0f} s")
        assert run(client, stop) == expected
