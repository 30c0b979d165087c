"""The official openai client, unmodified, with the engines that the SDK uses."""

import ast
import json
import subprocess
import sys
from typing import Any

import openai
import pytest
import tinker
from tinker import types
from transformers import AutoTokenizer

from tests.conftest import Service


@pytest.fixture
def openai_client(service: Service):
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="tml-local", max_retries=0) as made:
        yield made


@pytest.fixture
def tinker_client(service: Service):
    with tinker.ServiceClient() as made:
        yield made


def test_completions_equal_samples_of_the_tinker_sdk(
    openai_client: openai.OpenAI, tinker_client: tinker.ServiceClient
):
    info = tinker_client.create_lora_training_client("tiny", rank=2, seed=0).result().get_info()
    tokenizer = AutoTokenizer.from_pretrained(str(info.model_data.tokenizer_id))
    prompt = tokenizer.encode("Once upon a time")
    answer = openai_client.completions.create(
        model="tiny", prompt=prompt, max_tokens=8, seed=5, temperature=0.7, n=2, logprobs=2
    )
    sampler = tinker_client.create_sampling_client(base_model="tiny")
    params = types.SamplingParams(max_tokens=8, seed=5, temperature=0.7)
    expected = sampler.sample(types.ModelInput.from_ints(prompt), 2, params).result()
    for choice, sequence in zip(answer.choices, expected.sequences, strict=True):
        assert choice.text == tokenizer.decode(sequence.tokens, skip_special_tokens=True)
        assert choice.logprobs is not None and choice.logprobs.token_logprobs == pytest.approx(
            sequence.logprobs, abs=1e-4
        )
        assert choice.logprobs.top_logprobs is not None and len(
            choice.logprobs.top_logprobs
        ) == len(sequence.tokens)
        assert choice.finish_reason == sequence.stop_reason
    assert answer.usage is not None and answer.usage.prompt_tokens == len(prompt)
    greedy = openai_client.completions.create(
        model="tiny", prompt=prompt, max_tokens=8, temperature=0, n=3
    )
    alike = sampler.sample(
        types.ModelInput.from_ints(prompt), 3, types.SamplingParams(max_tokens=8, temperature=0)
    ).result()
    assert len(greedy.choices) == len(alike.sequences) == 3
    assert (
        len({choice.text for choice in greedy.choices})
        == len({tuple(one.tokens) for one in alike.sequences})
        == 1
    )
    both = openai_client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=2)
    assert [choice.index for choice in both.choices] == [0, 1]


def test_a_stream_equals_the_whole_answer_and_ends_at_stop_texts(
    openai_client: openai.OpenAI,
):
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 24,
        "seed": 3,
        "temperature": 1.0,
    }
    whole = openai_client.chat.completions.create(**asked)  # type: ignore[call-overload]
    text = whole.choices[0].message.content
    assert text

    def streamed(**more) -> tuple[list[str], str | None, int]:
        chunks = list(
            openai_client.chat.completions.create(
                **asked, **more, stream=True, stream_options={"include_usage": True}
            )
        )  # type: ignore[call-overload]
        pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
        reasons = [
            choice.finish_reason
            for chunk in chunks
            for choice in chunk.choices
            if choice.finish_reason
        ]
        assert chunks[-1].usage is not None and len(reasons) == 1
        return pieces, reasons[0], chunks[-1].usage.completion_tokens

    pieces, reason, count = streamed()
    assert (
        "".join(pieces) == text
        and reason == whole.choices[0].finish_reason
        and count == whole.usage.completion_tokens
    )
    assert sum(bool(piece) for piece in pieces) > 2  # it came in parts
    stop = text[len(text) // 2 :][:2]
    before = text[: text.index(stop)]
    assert "".join(streamed(stop=[stop])[0]) == before
    assert (
        openai_client.chat.completions.create(**asked, stop=stop).choices[0].message.content
        == before
    )  # type: ignore[call-overload]


def test_saved_samplers_are_listed_and_sampled_as_models(
    openai_client: openai.OpenAI, tinker_client: tinker.ServiceClient
):
    model = tinker_client.create_lora_training_client("tiny", rank=4, seed=1).result()
    row = list(range(40, 60))
    inputs = {"target_tokens": types.TensorData(data=row[1:], dtype="int64", shape=[19])}
    for _ in range(4):
        model.forward_backward(
            [types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs=inputs)],
            "cross_entropy",
        )
        model.optim_step(types.AdamParams(learning_rate=5e-2)).result()
    path = model.save_weights_for_sampler("for-openai").result().path
    sampler = tinker_client.create_sampling_client(model_path=path)
    assert {"tiny", path} <= {listed.id for listed in openai_client.models.list()}
    asked = {"prompt": row[:8], "max_tokens": 8, "temperature": 0.0}
    tuned = openai_client.completions.create(model=path, **asked)  # type: ignore[call-overload]
    base = openai_client.completions.create(model="tiny", **asked)  # type: ignore[call-overload]
    assert tuned.choices[0].text != base.choices[0].text
    assert tuned.system_fingerprint != base.system_fingerprint

    # The sampler is deleted, and saved again under the same name with other weights.
    rest, params = (
        tinker_client.create_rest_client(),
        types.SamplingParams(max_tokens=8, temperature=0.0),
    )
    prompt = types.ModelInput.from_ints(row[:8])
    first = sampler.sample(prompt, 1, params).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(openai.NotFoundError, match="no checkpoint"):
        openai_client.completions.create(model=path, **asked)  # type: ignore[call-overload]
    with pytest.raises(tinker.TinkerError, match="was deleted since sampler"):
        sampler.sample(prompt, 1, params).result()
    for _ in range(4):
        data = [
            types.Datum(
                model_input=types.ModelInput.from_ints(row[:-1][::-1]), loss_fn_inputs=inputs
            )
        ]
        model.forward_backward(data, "cross_entropy")
        model.optim_step(types.AdamParams(learning_rate=5e-2)).result()
    assert model.save_weights_for_sampler("for-openai").result().path == path
    again = openai_client.completions.create(model=path, **asked)  # type: ignore[call-overload]
    second = (
        tinker_client.create_sampling_client(model_path=path).sample(prompt, 1, params).result()
    )
    assert again.system_fingerprint != tuned.system_fingerprint
    assert second.sequences[0].logprobs != first.sequences[0].logprobs
    with pytest.raises(tinker.TinkerError, match="was saved again since sampler"):
        sampler.sample(prompt, 1, params).result()


def test_unsupported_requests_get_openai_errors(openai_client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError, match="the model 'gpt-9' does not exist"):
        openai_client.completions.create(model="gpt-9", prompt="x")
    with pytest.raises(openai.BadRequestError, match="best_of is not served"):
        openai_client.completions.create(model="tiny", prompt="x", best_of=2)
    with pytest.raises(openai.BadRequestError, match="Grammar error: Invalid type: nope"):
        openai_client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "x"}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "nope"}},
            },
        )
    with pytest.raises(openai.BadRequestError, match="omit top_logprobs"):
        openai_client.completions.create(model="tiny", prompt="x", logprobs=2, stream=True)
    with pytest.raises(openai.BadRequestError, match="top_logprobs needs logprobs"):
        openai_client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], top_logprobs=2
        )
    with pytest.raises(openai.BadRequestError, match="together they may have"):
        openai_client.completions.create(model="tiny", prompt="x", max_tokens=10**6)
    with pytest.raises(openai.BadRequestError, match="Extra inputs are not permitted"):
        openai_client.completions.create(model="tiny", prompt="x", extra_body={"min_tokens": 3})


def test_the_endpoint_is_published_in_the_ray_cluster(service: Service):
    """Another process of the Ray cluster reads it, as in docs/how-to/sample_elsewhere.md."""
    asked = (
        'import ray; from skyrl_actors import remote; ray.init("auto", log_to_driver=False); '
        f'print(remote.published("{service.name}"))'
    )
    found = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0, found.stderr
    said = ast.literal_eval(found.stdout.strip().splitlines()[-1])
    assert said == {"url": service.url, "openai_url": f"{service.url}/v1", "base_model": "tiny"}


def test_options_shape_what_the_engine_samples(
    openai_client: openai.OpenAI, tinker_client: tinker.ServiceClient
):
    info = tinker_client.create_lora_training_client("tiny", rank=2, seed=0).result().get_info()
    tokenizer = AutoTokenizer.from_pretrained(str(info.model_data.tokenizer_id))
    prompt = tokenizer.encode("Once upon a time")
    asked: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0}

    def sampled(**more: Any) -> list[str]:
        answer = openai_client.completions.create(**asked, **more)
        assert answer.choices[0].logprobs is not None
        return answer.choices[0].logprobs.tokens or []

    plain = sampled(logprobs=0)
    (wanted,) = tokenizer.encode("x", add_special_tokens=False)
    assert sampled(logprobs=0, logit_bias={str(wanted): 100}) == [tokenizer.decode([wanted])] * 6
    # Each penalty of 2 outweighs the next token of a greedy sample that repeats one.
    biased = {str(wanted): 100, str(wanted + 1): 99}
    assert len(set(sampled(logprobs=0, logit_bias=biased, presence_penalty=2))) == 2
    counted = sampled(logprobs=0, logit_bias=biased, frequency_penalty=2)
    assert len(set(counted)) == 2
    never = sampled(logprobs=0, logit_bias={str(tokenizer.encode(plain[0])[-1]): -100})
    assert plain[0] not in never

    schema = {
        "type": "object",
        "properties": {"answer": {"enum": ["yes", "no"]}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    formed = openai_client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=64,
        seed=1,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": schema, "strict": True},
        },
    )
    assert json.loads(formed.choices[0].message.content or "")["answer"] in ("yes", "no")


def test_echo_has_the_logprobs_that_the_sdk_computes(
    openai_client: openai.OpenAI, tinker_client: tinker.ServiceClient
):
    prompt = [5, 6, 7, 8]
    sampler = tinker_client.create_sampling_client(base_model="tiny")
    expected = sampler.compute_logprobs(types.ModelInput.from_ints(prompt)).result()
    for max_tokens in (0, 2):
        answer = openai_client.completions.create(
            model="tiny", prompt=prompt, max_tokens=max_tokens, echo=True, logprobs=1, seed=1
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.token_logprobs is not None
        assert logprobs.top_logprobs is not None
        assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
        assert logprobs.token_logprobs[1:4] == pytest.approx(expected[1:], abs=1e-4)
        assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 4 + max_tokens


def test_a_stream_of_several_choices_equals_the_whole_answer(openai_client: openai.OpenAI):
    asked: dict[str, Any] = {"model": "tiny", "prompt": "Once", "max_tokens": 8, "seed": 3, "n": 3}
    whole = [choice.text for choice in openai_client.completions.create(**asked).choices]
    texts = [""] * 3
    for event in openai_client.completions.create(**asked, stream=True):
        for choice in event.choices:
            texts[choice.index] += choice.text
    assert texts == whole and len(set(whole)) > 1
