"""The official SDK, unmodified, against a real service: Ray, Serve, workers, vLLM."""

import asyncio

import httpx
import numpy as np
import psutil
import pytest
import tinker
import torch
import torch.nn.functional as F
from tinker import types
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import Service, run_cli

RNG = np.random.default_rng(0)


@pytest.fixture
def client(service: Service):
    with tinker.ServiceClient() as made:
        yield made


@pytest.fixture
def model(client: tinker.ServiceClient):
    return client.create_lora_training_client("tiny", rank=8, seed=1).result()


def tokens(n: int, seed: int | None = None) -> list[int]:
    rng = RNG if seed is None else np.random.default_rng(seed)
    return rng.integers(0, 256, n).tolist()


def datum(n: int, seed: int | None = None, **fields) -> types.Datum:
    row = tokens(n + 1, seed)
    inputs = {"target_tokens": row[1:], **fields}
    return types.Datum(
        model_input=types.ModelInput.from_ints(row[:-1]),
        loss_fn_inputs={
            k: types.TensorData(
                data=list(v), dtype="int64" if k == "target_tokens" else "float32", shape=[n]
            )
            for k, v in inputs.items()
        },
    )


def logprobs_of(output: types.ForwardBackwardOutput) -> list[np.ndarray]:
    return [np.asarray(row["logprobs"].data) for row in output.loss_fn_outputs]


def test_supervised_training_lowers_the_loss(model: tinker.TrainingClient):
    data = [datum(n, seed=n, weights=[1.0] * n) for n in (5, 9, 20)]
    losses = []
    for _ in range(6):
        batch = model.forward_backward(data, "cross_entropy")
        step = model.optim_step(
            types.AdamParams(
                learning_rate=1e-2,
                beta1=0.8,
                beta2=0.9,
                eps=1e-8,
                weight_decay=0.01,
                grad_clip_norm=5.0,
            )
        )
        losses.append(batch.result().metrics["loss:sum"])
        assert step.result().metrics["skyrl.ai/grad_norm"] > 0
    assert losses[-1] < 0.8 * losses[0]


def test_forward_equals_forward_backward(model: tinker.TrainingClient):
    data = [datum(n, weights=[1.0] * n) for n in (7, 3, 12)]
    forward = logprobs_of(model.forward(data, "cross_entropy").result())
    both = model.forward_backward(data, "cross_entropy").result()
    for a, b, d in zip(forward, logprobs_of(both), data, strict=True):
        assert len(a) == d.model_input.length
        np.testing.assert_array_equal(a, b)
    assert both.metrics["loss:sum"] == pytest.approx(
        -sum(float(a.sum()) for a in forward), rel=1e-5
    )


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo"])
def test_policy_losses(model: tinker.TrainingClient, loss: str):
    n = 6
    data = [datum(n, logprobs=[-5.0] * n, advantages=[1.0, -1.0, 0.5, 0.0, 2.0, -0.3])]
    p = logprobs_of(model.forward([datum(n, seed=3, weights=[1.0] * n)], "cross_entropy").result())
    output = model.forward_backward(
        data,
        loss,
        {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1} if loss == "ppo" else None,
    ).result()
    p = logprobs_of(output)[0]
    ratio, a = np.exp(p + 5.0), np.asarray(data[0].loss_fn_inputs["advantages"].data)
    expected = (
        -(ratio * a).sum()
        if loss == "importance_sampling"
        else -np.minimum(ratio * a, np.clip(ratio, 0.9, 1.1) * a).sum()
    )
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)


def test_forward_backward_custom(model: tinker.TrainingClient):
    data = [datum(4, weights=[1.0] * 4), datum(6, weights=[1.0] * 6)]

    def loss(
        data: list[types.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        total = sum((lp**2).sum() for lp in logprobs)
        assert isinstance(total, torch.Tensor)
        return total, {"mine": float(total.detach())}

    output = model.forward_backward_custom(data, loss).result()
    plain = logprobs_of(model.forward(data, "cross_entropy").result())
    assert output.metrics["mine"] == pytest.approx(
        sum(float((lp**2).sum()) for lp in plain), rel=1e-4
    )


def test_several_clients_at_once_are_independent(client: tinker.ServiceClient):
    data = [datum(8, seed=1, weights=[1.0] * 8)]
    models = [client.create_lora_training_client("tiny", rank=4, seed=i).result() for i in range(3)]
    pending = []
    for i, model in enumerate(models):
        for _ in range(i + 1):
            pending.append(model.forward_backward(data, "cross_entropy"))
            pending.append(model.optim_step(types.AdamParams(learning_rate=1e-2)))
    for future in pending:
        future.result()
    values = [model.forward(data, "cross_entropy").result().metrics["loss:sum"] for model in models]
    assert values[0] > values[1] > values[2]


def test_samples(model: tinker.TrainingClient):
    model.forward_backward([datum(8, weights=[1.0] * 8)], "cross_entropy")
    model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    sampler = model.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(tokens(5, seed=2))

    def draw(n: int = 1, **params) -> list[types.SampledSequence]:
        wanted = types.SamplingParams(**{"max_tokens": 8, "stop": [], **params})
        return list(sampler.sample(prompt, n, wanted).result().sequences)

    both = draw(4, seed=11)
    assert [len(s.tokens) for s in both] == [8] * 4 and len({tuple(s.tokens) for s in both}) == 4
    assert [s.tokens for s in draw(4, seed=11)] == [s.tokens for s in both]
    assert all(
        s.logprobs is not None and len(s.logprobs) == 8 and s.stop_reason == "length" for s in both
    )
    greedy = [draw(temperature=0)[0].tokens, draw(top_k=1)[0].tokens, draw(top_p=1e-6)[0].tokens]
    assert greedy[0] == greedy[1] == greedy[2]
    stop = greedy[0][3]
    cut = draw(temperature=0, stop=[stop])[0]
    assert cut.stop_reason == "stop" and cut.tokens == greedy[0][: greedy[0].index(stop) + 1]


def test_a_stop_text_can_be_a_special_token(client: tinker.ServiceClient, service: Service):
    """Scripts name the mark at the end of a turn, which the text that people read leaves out."""
    tokenizer = AutoTokenizer.from_pretrained(service.base)
    sampler = client.create_sampling_client(base_model="tiny").result()
    prompt = types.ModelInput.from_ints(tokens(5, seed=2))

    def draw(seed: int, stop: list[str]) -> types.SampledSequence:
        params = types.SamplingParams(max_tokens=100, seed=seed, stop=stop)
        return sampler.sample(prompt, 1, params).result().sequences[0]

    marks = {tokenizer.convert_tokens_to_ids(mark): mark for mark in ("<|im_start|>", "<|im_end|>")}
    seed, free = next(
        (seed, one)
        for seed in range(50)
        if not marks.keys().isdisjoint((one := draw(seed, [])).tokens)
    )
    at = next(i for i, token in enumerate(free.tokens) if token in marks)
    cut = draw(seed, [marks[free.tokens[at]]])
    assert cut.stop_reason == "stop" and cut.tokens == free.tokens[: at + 1]


def test_a_sample_ends_at_a_stop_text(client: tinker.ServiceClient, service: Service):
    tokenizer = AutoTokenizer.from_pretrained(service.base)
    sampler = client.create_sampling_client(base_model="tiny").result()

    def draw(stop: list[str]) -> types.SampledSequence:
        params = types.SamplingParams(max_tokens=100, seed=5, stop=stop)
        return (
            sampler.sample(types.ModelInput.from_ints(tokens(5, seed=2)), 1, params)
            .result()
            .sequences[0]
        )

    free = draw([])
    at, letter = next(
        (i, t)
        for i, t in enumerate(map(tokenizer.decode, free.tokens))
        if t.isascii() and t.isalpha() and len(t) == 1
    )
    cut = draw([letter])
    assert cut.stop_reason == "stop" and cut.tokens == free.tokens[: at + 1]
    assert cut.logprobs is not None and len(cut.logprobs) == at + 1


def test_engine_logprobs_equal_the_trainers_and_samplers_are_frozen(
    model: tinker.TrainingClient, client: tinker.ServiceClient
):
    row = tokens(24, seed=5)
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={
                "target_tokens": types.TensorData(data=row[1:], dtype="int64", shape=[23])
            },
        )
    ]

    def trainer() -> np.ndarray:
        return logprobs_of(model.forward(data, "cross_entropy").result())[0]

    def engine(sampler: tinker.SamplingClient) -> np.ndarray:
        values = sampler.compute_logprobs(types.ModelInput.from_ints(row)).result()
        assert values[0] is None
        return np.asarray(values[1:], np.float64)

    base = client.create_sampling_client(base_model="tiny").result()
    start = trainer()
    samplers, expected = [base], [start]
    for _ in range(2):
        model.forward_backward([datum(23, seed=9, weights=[1.0] * 23)], "cross_entropy")
        model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        samplers.append(model.save_weights_and_get_sampling_client().result())
        expected.append(trainer())
    path = model.save_weights_for_sampler("frozen").result().path
    assert path is not None
    samplers.append(client.create_sampling_client(model_path=path).result())
    expected.append(expected[-1])
    model.forward_backward([datum(23, seed=9, weights=[1.0] * 23)], "cross_entropy")
    model.optim_step(types.AdamParams(learning_rate=5e-2)).result()
    assert (
        np.abs(expected[1] - expected[0]).max() > 0.01
        and np.abs(expected[2] - expected[1]).max() > 0.01
    )
    for _ in range(2):
        for sampler, want in zip(samplers, expected, strict=True):
            np.testing.assert_allclose(engine(sampler), want, atol=1e-4)


async def test_samplers_of_many_versions_at_once(
    model: tinker.TrainingClient, client: tinker.ServiceClient
):
    """One batch contains the base, two versions and prompt logprobs. Each uses its own weights."""
    row, prompts = tokens(24, seed=5), []
    samplers = [client.create_sampling_client(base_model="tiny").result()]
    for _ in range(2):
        model.forward_backward([datum(23, seed=9, weights=[1.0] * 23)], "cross_entropy")
        model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        samplers.append(model.save_weights_and_get_sampling_client().result())
    alone = [
        np.asarray(s.compute_logprobs(types.ModelInput.from_ints(row)).result()[1:], np.float64)
        for s in samplers
    ]
    for sampler in samplers * 4:
        prompts.append(sampler.compute_logprobs_async(types.ModelInput.from_ints(row)))
    together = await asyncio.gather(*prompts)
    for i, values in enumerate(together):
        np.testing.assert_allclose(np.asarray(values[1:], np.float64), alone[i % 3], atol=1e-5)


def test_base_logprobs_against_transformers(service: Service, client: tinker.ServiceClient):
    row = tokens(30, seed=6)
    reference = AutoModelForCausalLM.from_pretrained(service.base, dtype=torch.float64)
    with torch.no_grad():
        every = F.log_softmax(reference(input_ids=torch.tensor([row])).logits[0], -1)
    expected = every[:-1].gather(1, torch.tensor(row[1:])[:, None])[:, 0].numpy()
    sampler = client.create_sampling_client(base_model="tiny").result()
    values = sampler.compute_logprobs(types.ModelInput.from_ints(row)).result()
    np.testing.assert_allclose(np.asarray(values[1:], np.float64), expected, atol=1e-4)
    best = (
        sampler.sample(
            types.ModelInput.from_ints(row),
            1,
            types.SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=3,
        )
        .result()
        .topk_prompt_logprobs
    )
    assert best is not None and best[0] is None
    top = every[:-1].topk(3)
    for position, cells in enumerate(best[1:]):
        assert cells is not None
        assert [i for i, _ in cells] == top.indices[position].tolist()
        np.testing.assert_allclose([lp for _, lp in cells], top.values[position], atol=1e-4)


def test_the_likeliest_tokens_of_a_sample_and_of_the_prompts_end(
    service: Service, client: tinker.ServiceClient
):
    row, drawn_tokens = tokens(20, seed=7), 6
    sampler = client.create_sampling_client(base_model="tiny").result()
    answer = sampler.sample(
        types.ModelInput.from_ints(row),
        1,
        types.SamplingParams(max_tokens=drawn_tokens, seed=3, stop=[]),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=4,
        prompt_logprobs_last_n=5,
    ).result()
    (sequence,) = answer.sequences
    reference = AutoModelForCausalLM.from_pretrained(service.base, dtype=torch.float64)
    with torch.no_grad():
        every = F.log_softmax(
            reference(input_ids=torch.tensor([row + list(sequence.tokens)])).logits[0], -1
        )
    top = every[len(row) - 1 : -1].topk(4)
    assert sequence.topk_logprobs is not None and len(sequence.topk_logprobs) == drawn_tokens
    for position, cells in enumerate(sequence.topk_logprobs):
        assert cells is not None and [i for i, _ in cells] == top.indices[position].tolist()
        np.testing.assert_allclose([lp for _, lp in cells], top.values[position], atol=1e-4)
    assert answer.prompt_logprobs is not None and answer.topk_prompt_logprobs is not None
    assert answer.prompt_logprobs[:-5] == [None] * 15 and None not in answer.prompt_logprobs[-5:]
    assert [cells is None for cells in answer.topk_prompt_logprobs] == [True] * 15 + [False] * 5


def test_training_continues_from_a_saved_state(
    client: tinker.ServiceClient, model: tinker.TrainingClient
):
    data = [datum(10, seed=4, weights=[1.0] * 10)]

    def train(m: tinker.TrainingClient) -> None:
        m.forward_backward(data, "cross_entropy")
        m.optim_step(types.AdamParams(learning_rate=1e-2)).result()

    def values(m: tinker.TrainingClient) -> np.ndarray:
        return logprobs_of(m.forward(data, "cross_entropy").result())[0]

    train(model)
    saved = values(model)
    path = model.save_state("state").result().path
    train(model)
    after = values(model)
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    np.testing.assert_array_equal(values(resumed), saved)
    train(resumed)
    np.testing.assert_array_equal(values(resumed), after)
    fresh = client.create_training_client_from_state(path).result()
    train(fresh)
    assert np.abs(values(fresh) - after).max() > 1e-4  # without the moments the step differs
    model.load_state_with_optimizer(path).result()
    np.testing.assert_array_equal(values(model), saved)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_critic_learns_values(client: tinker.ServiceClient, service: Service, lora: bool):
    critic = (
        client.create_lora_training_client(
            "tiny", rank=8, seed=3, user_metadata={"model_role": "critic"}
        ).result()
        if lora
        else full_model(client, "critic")
    )
    n = 6
    goal = [0.5] * n

    def critic_datum() -> types.Datum:
        inputs = {"values": [0.0] * n, "returns": goal}
        return types.Datum(
            model_input=types.ModelInput.from_ints(tokens(n, seed=8)),
            loss_fn_inputs={
                k: types.TensorData(data=v, dtype="float32", shape=[n]) for k, v in inputs.items()
            },
        )

    plain = types.Datum(
        model_input=types.ModelInput.from_ints(tokens(n, seed=8)), loss_fn_inputs={}
    )
    before = np.asarray(
        critic.forward([plain], "ppo_critic").result().loss_fn_outputs[0]["values"].data
    )
    np.testing.assert_array_equal(before, np.zeros(n))
    for _ in range(10):
        output = critic.forward_backward([critic_datum()], "ppo_critic", {"value_clip": 10.0})
        critic.optim_step(types.AdamParams(learning_rate=1e-2))
        output.result()
    after = np.asarray(
        critic.forward([plain], "ppo_critic").result().loss_fn_outputs[0]["values"].data
    )
    assert np.abs(after - 0.5).mean() < 0.25
    with pytest.raises(tinker.APIStatusError, match="is a critic"):
        critic.save_weights_and_get_sampling_client().result()


ANSWER, PROMPT = 5, 7  # tokens


def of_answer(front: int, **fields: list[float]) -> types.Datum:
    """Make a datum as SkyRL's PPO client does: its inputs are those of the answer.

    `front`: zeros in front of the inputs, which other clients send.
    """
    row = tokens(PROMPT + ANSWER, seed=21)
    inputs = {"target_tokens": row[PROMPT:], **fields}
    return types.Datum(
        model_input=types.ModelInput.from_ints(row[:-1]),
        loss_fn_inputs={
            name: types.TensorData(
                data=[0] * front + list(values),
                dtype="int64" if name == "target_tokens" else "float32",
                shape=[front + ANSWER],
            )
            for name, values in inputs.items()
        },
    )


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_inputs_of_the_answer_alone_train_as_full_ones(
    client: tinker.ServiceClient, service: Service, role: str
):
    models = [
        client.create_lora_training_client(
            "tiny", rank=8, seed=3, user_metadata={"model_role": role}
        ).result()
        for _ in range(2)
    ]
    ones = [1.0] * ANSWER
    if role == "policy":
        loss, output = "ppo", "logprobs"
        inputs = {"weights": ones, "logprobs": [-5.0] * ANSWER, "advantages": [0.5] * ANSWER}
        scored, score = {"weights": ones}, "cross_entropy"
    else:
        loss, output = "ppo_critic", "values"
        inputs = {"weights": ones, "values": [0.0] * ANSWER, "returns": [0.5] * ANSWER}
        scored, score = {"weights": ones}, "ppo_critic"
    found = []
    for model, front in zip(models, (0, PROMPT - 1), strict=True):
        outputs = []
        for _ in range(2):
            passed = model.forward_backward([of_answer(front, **inputs)], loss).result()
            model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
            outputs.append(passed)
        outputs.append(model.forward([of_answer(front, **scored)], score).result())
        found.append([np.asarray(o.loss_fn_outputs[0][output].data) for o in outputs])
    for short, full in zip(*found, strict=True):
        assert short.shape == (ANSWER,)
        np.testing.assert_array_equal(short, full[-ANSWER:])
    assert np.abs(found[0][0] - found[0][2]).max() > 1e-3, "it learned"


def full_model(client: tinker.ServiceClient, role: str) -> tinker.TrainingClient:
    """Create a full fine-tune, which is rank 0. The SDK sends any rank that it gets."""
    return client.create_lora_training_client(
        "tiny", rank=0, user_metadata={"model_role": role}
    ).result()


def test_full_fine_tune_is_sampled_version_by_version(
    client: tinker.ServiceClient, service: Service
):
    model = full_model(client, "policy")
    row = tokens(20, seed=12)
    data = [datum(19, seed=12, weights=[1.0] * 19)]
    samplers, expected = [], []
    for _ in range(3):
        model.forward_backward(data, "cross_entropy")
        model.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        samplers.append(model.save_weights_and_get_sampling_client().result())
        expected.append(logprobs_of(model.forward(data, "cross_entropy").result())[0])
    assert np.abs(expected[2] - expected[0]).max() > 0.01
    for i in (2, 0, 1, 0, 2):
        values = samplers[i].compute_logprobs(types.ModelInput.from_ints(row)).result()
        np.testing.assert_allclose(np.asarray(values[1:], np.float64), expected[i], atol=1e-4)
    other = client.create_lora_training_client("tiny", rank=4).result()
    sampler = other.save_weights_and_get_sampling_client().result()
    base = (
        client.create_sampling_client(base_model="tiny")
        .result()
        .compute_logprobs(types.ModelInput.from_ints(row))
        .result()
    )
    found = sampler.compute_logprobs(types.ModelInput.from_ints(row)).result()
    np.testing.assert_allclose(
        np.asarray(found[1:], np.float64), np.asarray(base[1:], np.float64), atol=1e-5
    )


def test_wrong_requests_are_explained_and_the_service_continues(
    client: tinker.ServiceClient, model: tinker.TrainingClient
):
    good = datum(4, weights=[1.0] * 4)
    missing = datum(4, advantages=[1.0] * 4)
    for data, loss, config, said in (
        ([good], "nope", None, "unknown loss 'nope'"),
        ([good], "ppo", None, "missing: logprobs, advantages"),
        ([good], "cross_entropy", {"x": 1.0}, "has no option 'x'"),
        ([good, missing], "cross_entropy", None, "datum 1 has loss_fn_inputs"),
        ([datum(600, weights=[1.0] * 600)], "cross_entropy", None, "takes 512"),
        ([datum(4, values=[0.0] * 4, returns=[0.0] * 4)], "ppo_critic", None, "is for a critic"),
    ):
        with pytest.raises((tinker.APIStatusError, tinker.RequestFailedError), match=said):
            model.forward_backward(data, loss, config).result()  # type: ignore[arg-type]
    model.forward_backward([good], "cross_entropy").result()
    with pytest.raises(tinker.APIStatusError, match="unknown base model 'gpt-9'"):
        client.create_lora_training_client("gpt-9", rank=4).result()
    with pytest.raises(tinker.APIStatusError, match="takes 1 to 32"):
        client.create_lora_training_client("tiny", rank=33).result()
    with pytest.raises((tinker.APIStatusError, tinker.RequestFailedError), match="no checkpoint"):
        client.create_training_client_from_state("tinker://nobody:train:0/weights/x").result()
    for path, said in (
        ("tinker://a/b", "not a tinker path"),
        ("tinker://a/sampler_weights/b", "no checkpoint"),
    ):
        with pytest.raises(tinker.APIStatusError, match=said):
            client.create_sampling_client(model_path=path).result()
    sampler = client.create_sampling_client(base_model="tiny").result()
    with pytest.raises(
        (tinker.APIStatusError, tinker.RequestFailedError), match="together they may have 512"
    ):
        sampler.sample(
            types.ModelInput.from_ints(tokens(5)), 1, types.SamplingParams(max_tokens=600)
        ).result()


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("create_model", {}, 422, "session_id: Field required"),
        (
            "create_model",
            {"session_id": "x", "model_seq_id": 0, "base_model": "tiny"},
            404,
            "unknown session",
        ),
        (
            "create_model",
            {"session_id": "../x", "model_seq_id": 0, "base_model": "tiny"},
            422,
            "session id '../x'",
        ),
        ("optim_step", {"model_id": "nobody"}, 404, "unknown model"),
        (
            "optim_step",
            {"model_id": "nobody", "adam_params": {"learning_rate": "fast"}},
            422,
            "adam_params.learning_rate",
        ),
        ("forward_backward", {"model_id": "m"}, 422, "forward_backward_input"),
        ("load_weights", {"path": "tinker://a/weights/b", "model_id": "m"}, 404, "unknown model"),
        ("load_weights", {"path": "tinker://a/b", "model_id": "m"}, 422, "is not a tinker path"),
        (
            "asample",
            {"prompt": {"chunks": [{"type": "image"}]}, "base_model": "tiny"},
            422,
            "only text tokens",
        ),
        ("asample", {"prompt": {"chunks": []}}, 422, "needs sampling_session_id"),
        ("asample", {"prompt": {"chunks": []}, "base_model": "x"}, 422, "unknown base model"),
        ("retrieve_future", {"request_id": "r-none"}, 410, "not known"),
        ("weights_info", {"tinker_path": "tinker://../weights/x"}, 422, "model id '..'"),
        ("session_heartbeat", {"session_id": "none"}, 410, "has ended"),
    ],
)
def test_bad_requests_get_a_json_body(
    service: Service, path: str, body: dict, status: int, said: str
):
    answer = httpx.post(f"{service.url}/api/v1/{path}", json=body)
    assert answer.status_code == status, answer.text
    assert said in answer.json()["detail"]


def test_malformed_bodies_are_refused(service: Service):
    url = f"{service.url}/api/v1/forward_backward"
    proto = {"Content-Type": "application/x-protobuf"}
    assert httpx.post(url, content=b"\xff\xff", headers=proto).status_code == 422
    assert httpx.post(url, content=b"[1]").status_code == 422
    assert (
        httpx.post(url, content=b"x", headers={**proto, "Content-Encoding": "br"}).status_code
        == 422
    )
    too_long = httpx.post(url, content=b"x" * (64 * 2**20 + 1), headers=proto, timeout=60)
    assert too_long.status_code == 413 and "at most 67108864" in too_long.json()["detail"]
    assert httpx.get(f"{service.url}/api/v1/nothing").status_code == 404
    assert httpx.get(f"{service.url}/healthz").json() == {"status": "ok"}


def test_status_shows_what_runs(service: Service, model: tinker.TrainingClient):
    shown = run_cli("status", "--name", service.name)
    assert shown.returncode == 0, shown.stderr
    for text in ("models", "engines", "groups", model.model_id, "policy"):
        assert text in shown.stdout
    missing = run_cli("status", "--name", "nobody")
    assert missing.returncode == 2 and "no service named 'nobody'" in missing.stderr


def test_a_second_service_of_the_same_name_or_port_is_refused(service: Service):
    port = service.url.rsplit(":", 1)[1]
    taken = run_cli("serve", "configs/cpu_tiny.yaml", f"http.port={port}")
    assert taken.returncode == 2 and "cannot be bound" in taken.stderr


def test_nothing_of_haproxy_is_open_to_the_network(service: Service):
    ports = {
        c.laddr.port: c.laddr.ip
        for c in psutil.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN
    }
    owners = [p for p in psutil.process_iter(["name"]) if p.info["name"] == "haproxy"]
    listening = {
        c.laddr.port
        for p in owners
        for c in p.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN
    }
    assert int(service.url.rsplit(":", 1)[1]) in listening
    assert {ports[port] for port in listening} == {"127.0.0.1"}
