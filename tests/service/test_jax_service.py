"""A service whose ranks and engines compute with JAX, through the SDK, and a killed rank."""

import random
import re
from pathlib import Path

import pytest
import tinker
from tinker import types

from bench import faults
from tests.conftest import free_port, run_cli
from tests.service.served_folder import train_default_lora
from tests.service.test_sdk import datum

CONFIG = "configs/cpu_tiny_jax.yaml"


HOSTED = ("engine.process=policy", "engine.num_threads=2")
MESH = ("policy.num_ranks=2", "policy.strategy.fsdp=2", "critic=null", "engine.num_engines=2")


def sampled(model: tinker.TrainingClient) -> list[int]:
    """Sample with the model's weights."""
    sampler = model.save_weights_and_get_sampling_client().result()
    how = types.SamplingParams(max_tokens=8, seed=3, temperature=1.0)
    prompt = types.ModelInput.from_ints([5, 6, 7])
    return sampler.sample(prompt, 1, how).result().sequences[0].tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "devices", [(), MESH, HOSTED], ids=["one rank", "a mesh of two", "an engine in the rank"]
)
def test_a_service_on_jax_trains_samples_and_survives_a_killed_rank(
    tmp_path: Path, devices: tuple[str, ...]
):
    port = free_port()
    name, url = f"jax-{port}", f"http://127.0.0.1:{port}"
    options = (f"name={name}", f"http.port={port}", f"checkpoint_dir={tmp_path / 'checkpoints'}")
    started = run_cli("serve", CONFIG, *options, "base_model.warmup_steps=0", *devices, timeout=600)
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        with tinker.ServiceClient(base_url=url, api_key="tml-test") as client:
            train_default_lora(client, "skyrl-actors/tiny")
            model = client.create_lora_training_client("skyrl-actors/tiny", rank=4).result()
            params = types.AdamParams(learning_rate=1e-2)
            model.forward_backward([datum(9, seed=1)], "cross_entropy").result()
            model.optim_step(params).result()
            before = model.forward([datum(9, seed=1)], "cross_entropy").result()
            drawn = sampled(model)
            assert faults.kill(name, "rank", random.Random(0))
            after = model.forward([datum(9, seed=1)], "cross_entropy").result()
            # From the cache on disk and by replay: the same bits.
            assert after.metrics["loss:sum"] == before.metrics["loss:sum"]
            assert sampled(model) == drawn
            checked = run_cli("doctor", "--port", str(port), "--name", name)
            assert re.search(r"programs: \d+ for \d+ shapes, \d+ of them from", checked.stdout)
    finally:
        stopped = run_cli("stop", "--name", name)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
