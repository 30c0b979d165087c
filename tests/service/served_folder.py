"""`serve FOLDER`, and a default LoRA of it through the SDK."""

from pathlib import Path

import tinker
from tinker import types

from skyrl_actors.config.load import load
from tests.conftest import free_port, run_cli
from tests.service.test_sdk import datum


def serve_and_train(folder: Path) -> None:
    """Serve a model's folder without a config; create, train, save and sample a default LoRA."""
    port, family = free_port(), folder.name
    name = f"model-{port}"
    arguments = ("serve", f"./{family}", f"name={name}", f"http.port={port}")
    started = run_cli(*arguments, cwd=folder.parent)
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        assert "layout    colocated" in started.stdout
        assert load(folder.parent / f"{family}-service.yaml").http.port == port
        client = tinker.ServiceClient(base_url=f"http://127.0.0.1:{port}", api_key="tml-test")
        with client:
            train_default_lora(client, family)
    finally:
        stopped = run_cli("stop", "--name", name)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr


def train_default_lora(client: tinker.ServiceClient, base_model: str) -> None:
    model = client.create_lora_training_client(base_model, rank=8).result()
    losses = []
    for _ in range(3):
        batch = model.forward_backward([datum(9, seed=1)], "cross_entropy").result()
        model.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        losses.append(batch.metrics["loss:sum"])
    assert losses[2] < losses[1] < losses[0]
    saved = model.save_state("trained").result().path
    assert client.create_training_client_from_state(saved).result().get_info()
    sampler = model.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints([5, 6])
    params = types.SamplingParams(max_tokens=4, seed=1)
    answers = [sampler.sample(prompt, 2, params).result().sequences for _ in range(2)]
    drawn = [[list(one.tokens) for one in sequences] for sequences in answers]
    # A model with random weights may draw the token that ends a sequence.
    assert drawn[0] == drawn[1] and all(1 <= len(tokens) <= 4 for tokens in drawn[0])
