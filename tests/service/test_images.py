"""A service whose base takes images, through the unmodified SDK."""

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from bench import faults
from examples.vision_sft import VisionChat
from skyrl_actors.jobs.shapes import ShapeTask, shape_tasks
from tests.conftest import ROOT, free_port, run_cli

BASE, CONFIG = "skyrl-actors/tiny-vl", "configs/cpu_tiny_vl.yaml"
KINDS = ("rank", "controller", "engine actor", "vLLM process")
ADAM = types.AdamParams(learning_rate=1e-2, eps=1e-8)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Yield the name and the address of a service."""
    folder, port = tmp_path_factory.mktemp("images"), free_port()
    name = f"images-{port}"
    options = (f"name={name}", f"http.port={port}", f"checkpoint_dir={folder / 'checkpoints'}")
    started = run_cli("serve", CONFIG, *options, timeout=600)
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        yield name, f"http://127.0.0.1:{port}"
    finally:
        stopped = run_cli("stop", "--name", name)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr


def row(chat: VisionChat, task: ShapeTask) -> types.ModelInput:
    """Return a prompt with its answer."""
    answer = types.EncodedTextChunk(tokens=chat.answer(task.answer))
    return types.ModelInput(chunks=[*chat.prompt(task).chunks, answer])


def trained(client: tinker.ServiceClient, steps: int, between: Callable[[int], None]) -> list[Any]:
    """Return the numbers of a short run with images. `between` is called inside each step."""
    model = client.create_lora_training_client(BASE, rank=4, seed=11).result()
    chat, seen = VisionChat(model.get_tokenizer()), list[Any]()
    for step in range(steps):
        data = [chat.datum(task) for task in shape_tasks(6, seed=step)]
        first = model.forward_backward(data[:4], "cross_entropy")
        between(step)
        second = model.forward_backward(data[4:], "cross_entropy")
        stepped = model.optim_step(ADAM)
        seen += [each.result().metrics["loss:sum"] for each in (first, second)]
        seen.append((stepped.result().metrics or {})["skyrl.ai/grad_norm"])
        sampler = model.save_weights_and_get_sampling_client().result()
        how = types.SamplingParams(max_tokens=8, seed=3, temperature=1.0, stop=[])
        (task,) = shape_tasks(1, seed=50)
        drawn = sampler.sample(chat.prompt(task), 2, how)
        seen.append([sequence.tokens for sequence in drawn.result().sequences])
    return seen


@pytest.mark.slow
def test_training_on_images_while_processes_are_killed_gives_the_same_numbers(
    served: tuple[str, str],
):
    name, url = served
    choice, killed = random.Random(3), list[Any]()

    def kill(step: int) -> None:
        killed.append((KINDS[step], faults.kill(name, KINDS[step], choice)))

    with tinker.ServiceClient(base_url=url, api_key="tml-test") as client:
        disturbed = trained(client, len(KINDS), kill)
        assert all(pids for _, pids in killed), killed
        assert trained(client, len(KINDS), lambda step: None) == disturbed


@pytest.mark.slow
def test_images_in_every_call_of_the_sdk(served: tuple[str, str]):
    """Two tenants train on images; engine and trainer score images alike."""
    with tinker.ServiceClient(base_url=served[1], api_key="tml-test") as client:
        model, other = (
            client.create_lora_training_client(BASE, rank=4, seed=seed).result() for seed in (1, 2)
        )
        chat, tasks = VisionChat(model.get_tokenizer()), list(shape_tasks(4, seed=9))
        data = [chat.datum(task) for task in tasks]
        alone = [m.forward(data, "cross_entropy").result() for m in (model, other)]
        both = [m.forward(data, "cross_entropy") for m in (model, other)]
        for output, future in zip(alone, both, strict=True):
            together = future.result().metrics["loss:sum"]
            assert together == pytest.approx(output.metrics["loss:sum"], rel=1e-6)
        model.forward_backward(data, "cross_entropy").result()
        model.optim_step(ADAM).result()
        model.forward_backward_custom(data, _squares).result()
        model.optim_step(ADAM).result()
        sampler = model.save_weights_and_get_sampling_client().result()
        for task, output in zip(
            tasks, model.forward(data, "cross_entropy").result().loss_fn_outputs, strict=True
        ):
            prompt = row(chat, task)
            scored = sampler.compute_logprobs(prompt).result()
            assert len(scored) == prompt.length and scored[0] is None
            known = chat.prompt(task).length  # the targets before the answer are 0
            own = np.asarray(output["logprobs"].data)[known - 1 :]
            np.testing.assert_allclose(own, np.asarray(scored[known:], float), atol=1e-4)
        policy = [_rl_datum(chat, sampler, task) for task in tasks]
        for loss in ("importance_sampling", "ppo", "cispo"):
            assert np.isfinite(model.forward_backward(policy, loss).result().metrics["loss:sum"])
        model.optim_step(ADAM).result()


def _squares(data: list[types.Datum], logprobs: list[torch.Tensor]) -> Any:
    loss = torch.stack([(own**2).mean() for own in logprobs]).sum()
    return loss, {"squares": float(loss)}


def _rl_datum(chat: VisionChat, sampler: tinker.SamplingClient, task: ShapeTask) -> types.Datum:
    how = types.SamplingParams(max_tokens=6, seed=1, temperature=1.0, stop=[])
    prompt = chat.prompt(task)
    (drawn,) = sampler.sample(prompt, 1, how).result().sequences
    known, tokens = prompt.length - 1, drawn.tokens

    def tensor(values: list[float], dtype: Any = "float32") -> types.TensorData:
        return types.TensorData(data=values, dtype=dtype, shape=[len(values)])

    return types.Datum(
        model_input=types.ModelInput(
            chunks=[*prompt.chunks, types.EncodedTextChunk(tokens=tokens[:-1])]
        ),
        loss_fn_inputs={
            "target_tokens": tensor([0] * known + list(tokens), "int64"),
            "logprobs": tensor([0.0] * known + list(drawn.logprobs or ())),
            "advantages": tensor([0.0] * known + [0.5] * len(tokens)),
        },
    )


@pytest.mark.slow
def test_the_example_names_coloured_shapes(served: tuple[str, str]):
    where = {"TINKER_BASE_URL": served[1], "TINKER_API_KEY": "tml-test"}
    command = [sys.executable, "-m", "examples.vision_sft"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **where}, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = (
        float(found) for found in re.findall(r"held-out accuracy \w+: +([\d.]+)", done.stdout)
    )
    assert before < 0.2 and after > 0.9
