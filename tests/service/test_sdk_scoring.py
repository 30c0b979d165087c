"""Several tokens at one position, through the SDK.

These are distillation targets, scored ids, alternatives and the likeliest tokens.
"""

import json

import httpx
import numpy as np
import pytest
import tinker
import torch
import torch.nn.functional as F
from tinker import types
from transformers import AutoModelForCausalLM

from tests.conftest import Service, run_cli

TOKENS = [40, 7, 99, 200, 13, 8]


@pytest.fixture
def client(service: Service):
    with tinker.ServiceClient() as made:
        yield made


@pytest.fixture
def own(client: tinker.ServiceClient, service: Service) -> np.ndarray:
    """Return transformers' logprobs of the base, [P - 1, V], at prompt tokens 1, 2, …"""
    info = client.create_lora_training_client("tiny", rank=2, seed=0).result().get_info()
    assert info.model_data.tokenizer_id is not None
    base = AutoModelForCausalLM.from_pretrained(info.model_data.tokenizer_id)
    with torch.no_grad():
        return F.log_softmax(base(torch.tensor([TOKENS])).logits[0], -1).numpy()[:-1]


def test_distillation_towards_the_likeliest_tokens_of_a_teacher(
    client: tinker.ServiceClient, own: np.ndarray
):
    """The top K of the teacher's prompt logprobs become (N, K) targets and weights.

    The cookbook does the same.
    """
    prompt, k = types.ModelInput.from_ints(TOKENS), 3
    teacher = client.create_sampling_client(base_model="tiny")
    params = types.SamplingParams(max_tokens=1)
    answer = teacher.sample(
        prompt, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=k
    ).result()
    assert answer.topk_prompt_logprobs is not None
    rows = [row or [] for row in answer.topk_prompt_logprobs[1:]]
    assert [[i for i, _ in row] for row in rows] == np.argsort(-own, 1)[:, :k].tolist()
    targets, weights = (
        torch.tensor([[cell[part] for cell in row] for row in rows]) for part in (0, 1)
    )
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": targets, "weights": weights.exp()},
    )
    student = client.create_lora_training_client("tiny", rank=8, seed=1).result()
    first = student.forward_backward([datum], "cross_entropy").result()
    logprobs = first.loss_fn_outputs[0]["logprobs"]
    assert logprobs.shape == [len(TOKENS) - 1, k]
    found = np.asarray(logprobs.data).reshape(len(TOKENS) - 1, k)
    np.testing.assert_allclose(found, weights, atol=2e-4)
    assert first.metrics["loss:sum"] == pytest.approx(
        -float((weights.exp() * weights).sum()), rel=1e-3
    )
    student.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    with pytest.raises(tinker.TinkerError, match="takes inputs of one value for each token"):
        student.forward_backward([datum], "importance_sampling").result()


def test_ids_are_scored_and_alternatives_sampled_along_the_prompt(
    client: tinker.ServiceClient, own: np.ndarray
):
    sampler, prompt = (
        client.create_sampling_client(base_model="tiny"),
        types.ModelInput.from_ints(TOKENS),
    )
    ids = torch.tensor([[5, -1], [6, 7], [-1, -1], [0, 255], [1, 2]])
    params = types.SamplingParams(max_tokens=1, seed=3, temperature=0.5)
    target = types.TensorData.from_torch(ids)
    answer = sampler.sample(
        prompt, 1, params, target_prompt_logprobs=target, prompt_alt_tokens_k=4
    ).result()
    expected = np.where(ids < 0, 0.0, np.take_along_axis(own, ids.clamp(min=0).numpy(), 1))
    assert answer.target_prompt_logprobs is not None and answer.prompt_alt_tokens is not None
    np.testing.assert_allclose(answer.target_prompt_logprobs.to_torch(), expected, atol=2e-4)
    drawn, logprobs = (
        answer.prompt_alt_tokens.tokens.to_torch(),
        answer.prompt_alt_tokens.logprobs.to_torch(),
    )
    np.testing.assert_allclose(logprobs, np.take_along_axis(own, drawn.numpy(), 1), atol=2e-4)
    again = sampler.sample(prompt, 1, params, prompt_alt_tokens_k=4).result()
    assert again.prompt_alt_tokens is not None and torch.equal(
        again.prompt_alt_tokens.tokens.to_torch(), drawn
    )
    with pytest.raises(tinker.TinkerError, match="has 2 rows; a prompt of 6 tokens needs 5"):
        sampler.sample(
            prompt, 1, params, target_prompt_logprobs=types.TensorData.from_torch(ids[:2])
        ).result()


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_logprobs_of_samples_at_their_temperature_and_at_1(
    service: Service, client: tinker.ServiceClient, temperature: float
):
    """The tokens are the same with both, in one batch with other requests.

    Logprobs are compared with the float64 softmax of transformers' logits.
    """
    info = client.create_lora_training_client("tiny", rank=2, seed=0).result().get_info()
    base = AutoModelForCausalLM.from_pretrained(str(info.model_data.tokenizer_id))
    sampler = client.create_sampling_client(base_model="tiny")
    params = types.SamplingParams(max_tokens=8, temperature=temperature)
    beside = [sampler.sample(types.ModelInput.from_ints(TOKENS), 1, params) for _ in range(8)]
    asked = {
        "model": "tiny",
        "prompt": TOKENS,
        "max_tokens": 8,
        "seed": 5,
        "temperature": temperature,
        "logprobs": 3,
    }

    def sampled(**more: object) -> tuple[list[str], list[float], list[list[float]]]:
        answer = httpx.post(
            f"{service.url}/v1/completions",
            json=asked | more,
            headers={"X-API-Key": "tml-test"},
            timeout=60,
        )
        found = answer.json()["choices"][0]["logprobs"]
        return (
            found["tokens"],
            found["token_logprobs"],
            [sorted(row.values())[::-1] for row in found["top_logprobs"]],
        )

    given = types.SamplingParams(max_tokens=8, temperature=temperature, seed=5)
    tokens = (
        sampler.sample(types.ModelInput.from_ints(TOKENS), 1, given).result().sequences[0].tokens
    )
    with torch.no_grad():
        logits = base.double()(torch.tensor([TOKENS + tokens])).logits[0][len(TOKENS) - 1 : -1]
    texts = []
    for divisor, more in (
        (1.0, {}),
        (temperature, {"tempered_logprobs": True}),
        (temperature, {"tempered_logprobs": True, "stop": ["zq"]}),
    ):
        expected = F.log_softmax(logits / divisor, -1).numpy()
        text, found, likeliest = sampled(**more)
        texts.append(text)
        np.testing.assert_allclose(found, expected[np.arange(len(tokens)), tokens], atol=2e-4)
        np.testing.assert_allclose([row[0] for row in likeliest], expected.max(1), atol=2e-4)
    assert texts[0] == texts[1] == texts[2]
    assert all(future.result().sequences[0].logprobs for future in beside)


def test_ratios_are_1_on_policy_with_temperature_top_k_and_top_p(
    service: Service, client: tinker.ServiceClient
):
    """A trained adapter samples, and the trainer scores the samples with the same options."""
    student = client.create_lora_training_client("tiny", rank=8, seed=4).result()
    row = types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)},  # type: ignore[arg-type]
    )
    student.forward_backward([row], "cross_entropy").result()
    student.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    path = student.save_weights_for_sampler("processed").result().path
    options = {"temperature": 1.3, "top_k": 12, "top_p": 0.8}
    answer = httpx.post(
        f"{service.url}/v1/completions",
        json={
            "model": path,
            "prompt": TOKENS,
            "max_tokens": 12,
            "seed": 3,
            "logprobs": 0,
            "processed_logprobs": True,
            **options,
        },
        headers={"X-API-Key": "tml-test"},
        timeout=60,
    )
    q = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
    params = types.SamplingParams(max_tokens=12, seed=3, **options)  # type: ignore[arg-type]
    prompt = types.ModelInput.from_ints(TOKENS)
    (drawn,) = (
        client.create_sampling_client(model_path=path).sample(prompt, 1, params).result().sequences
    )
    own, skipped = drawn.tokens, len(TOKENS) - 1
    counted = [0.0] * skipped + [1.0] * len(own)
    sampled = types.Datum(
        model_input=types.ModelInput.from_ints((TOKENS + own)[:-1]),
        loss_fn_inputs={
            "target_tokens": (TOKENS + own)[1:],
            "logprobs": [0.0] * skipped + q,
            "advantages": [1.0] * len(counted),
            "weights": counted,
        },  # type: ignore[arg-type]
    )
    found = student.forward_backward([sampled], "importance_sampling", options).result()
    p = np.asarray(found.loss_fn_outputs[0]["logprobs"].data)[skipped:]
    np.testing.assert_allclose(p, q, atol=2e-4)
    ratios = -np.asarray(found.loss_fn_outputs[0]["elementwise_loss"].data)[skipped:]
    np.testing.assert_allclose(ratios, 1.0, atol=2e-4)
    assert np.abs(np.asarray(drawn.logprobs) - q).max() > 0.1  # other than the model's own
    with pytest.raises(tinker.TinkerError, match="top_p is 2"):
        student.forward_backward([sampled], "importance_sampling", {"top_p": 2.0}).result()


def restarts(service: Service) -> list[int]:
    status = json.loads(run_cli("status", "--name", service.name, "--json").stdout)
    return [engine["restarts"] for engine in status["engines"]]


def test_a_prompt_beyond_the_tokens_of_a_step_does_not_kill_the_engine(
    client: tinker.ServiceClient, service: Service
):
    """A prompt beyond the token limit of a step does not kill the engine.

    vLLM would split it and rewind its generator, which torch cannot do on a CPU.
    """
    before = restarts(service)
    sampler, rng = client.create_sampling_client(base_model="tiny"), np.random.default_rng(8)
    prompts = [types.ModelInput.from_ints(rng.integers(0, 256, 300).tolist()) for _ in range(16)]
    scored = [sampler.compute_logprobs(prompt) for prompt in prompts]
    drawn = [sampler.sample(prompt, 1, types.SamplingParams(max_tokens=4)) for prompt in prompts]
    assert all(len(future.result()) == 300 for future in scored)
    assert all(len(future.result().sequences[0].tokens) >= 1 for future in drawn)
    assert restarts(service) == before
