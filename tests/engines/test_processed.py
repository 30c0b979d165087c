"""Logprobs of the sampling distribution, from vLLM's own sampler, against softmax in float64."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.v1.engine import logprobs
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from skyrl_actors.engines import vllm_processed
from skyrl_actors.engines.interface import PROCESSED
from skyrl_actors.engines.vllm_samples import as_output, so_far, vllm_params
from skyrl_actors.losses.processing import Processing
from skyrl_actors.messages.errors import InternalError
from skyrl_actors.messages.requests import SamplingParams
from tests.workers.test_processed_logprobs import allowed

VOCABULARY = 50
PARAMS = (
    SamplingParams(max_tokens=1, temperature=0.7, tempered_logprobs=True),
    SamplingParams(max_tokens=1, temperature=1.3, tempered_logprobs=True, topk_sample_logprobs=3),
    SamplingParams(max_tokens=1, temperature=0.7, topk_sample_logprobs=2),
    SamplingParams(max_tokens=1, temperature=0.0, tempered_logprobs=True, topk_sample_logprobs=1),
    SamplingParams(max_tokens=1, temperature=1.0, tempered_logprobs=True),
    SamplingParams(max_tokens=1, temperature=1.3, tempered_logprobs=True, top_k=5, top_p=0.9),
    SamplingParams(max_tokens=1, temperature=1.3, processed_logprobs=True, top_k=5, top_p=0.9),
    SamplingParams(max_tokens=1, temperature=1.0, processed_logprobs=True, top_p=0.5),
    SamplingParams(max_tokens=1, temperature=0.4, processed_logprobs=True),
    SamplingParams(max_tokens=1, temperature=0.0, processed_logprobs=True, top_k=5),
)


@pytest.fixture(autouse=True)
def uncompiled():
    """Run token ranks uncompiled: compiling takes a minute and changes nothing here."""
    with torch.compiler.set_stance("force_eager"):
        yield


def wanted64(logits: np.ndarray, params: SamplingParams, token: int) -> np.ndarray:
    """Return [V]: the logprobs that a client is shown, for the logits [V] of a sampled token."""
    if not params.shows_processed or not params.temperature:
        return softmax64(logits, 1.0)
    found = softmax64(logits, params.temperature)
    if params.processed_logprobs:
        limits = Processing(top_k=max(params.top_k, 0), top_p=params.top_p)
        left = allowed(found, limits)
        left[token] = True
        found -= np.log(np.exp(found[left]).sum())
    return found


def softmax64(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Return log softmax over the last axis."""
    scaled = logits.astype(np.float64) / temperature
    scaled -= scaled.max(-1, keepdims=True)
    return scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))


def metadata(params: tuple[SamplingParams, ...]) -> SamplingMetadata:
    asked, nothing = [vllm_params(each) for each in params], torch.zeros(len(params))
    top_k = torch.tensor(
        [each.top_k if each.top_k > 0 else VOCABULARY for each in asked], dtype=torch.int32
    )
    return SamplingMetadata(
        temperature=torch.tensor([each.temperature for each in asked]),
        all_greedy=False,
        all_random=False,
        top_p=torch.tensor([each.top_p for each in asked]),
        top_k=top_k,
        generators={row: torch.Generator().manual_seed(row) for row in range(len(asked))},
        max_num_logprobs=max(each.logprobs or 0 for each in asked),
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=nothing,
        presence_penalties=nothing,
        repetition_penalties=nothing + 1,
        output_token_ids=[[] for _ in asked],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def runner_of(params: tuple[SamplingParams, ...]) -> Any:
    names = [f"r{row}" for row in range(len(params))]
    requests = {
        name: SimpleNamespace(sampling_params=vllm_params(each))
        for name, each in zip(names, params, strict=True)
    }
    return SimpleNamespace(
        sampler=Sampler(), input_batch=SimpleNamespace(req_ids=names), requests=requests
    )


def answered(found: LogprobsTensors, row: int, params: SamplingParams) -> Any:
    """Return a row as vLLM answers it: the requested entries and the sampled token's."""
    count = 1 + (vllm_params(params).logprobs or 0)
    ranks = [int(found.selected_token_ranks[row]), *range(1, count)]
    cells = zip(
        found.logprob_token_ids[row].tolist()[:count],
        found.logprobs[row].tolist()[:count],
        ranks,
        strict=True,
    )
    step = {token: SimpleNamespace(logprob=logprob, rank=rank) for token, logprob, rank in cells}
    token = int(found.logprob_token_ids[row, 0])
    choice = SimpleNamespace(
        token_ids=[token], logprobs=[step], finish_reason="length", weight_versions=()
    )
    return SimpleNamespace(
        outputs=[choice], prompt_logprobs=None, prompt_token_ids=[1], num_cached_tokens=0
    )


def test_each_request_of_a_batch_gets_both_logprobs_right():
    logits = torch.randn(len(PARAMS), VOCABULARY, generator=torch.Generator().manual_seed(3)) * 3
    plain = Sampler()(logits.clone(), metadata(PARAMS))
    runner = runner_of(PARAMS)
    assert vllm_processed.install(runner)
    found = runner.sampler(logits=logits.clone(), sampling_metadata=metadata(PARAMS))
    assert found.sampled_token_ids.tolist() == plain.sampled_token_ids.tolist()
    at_one = softmax64(logits.numpy(), 1.0)
    for row, params in enumerate(PARAMS):
        output = answered(found.logprobs_tensors, row, params)
        (one,), (token,) = (
            as_output(output, "base", params).sequences,
            found.sampled_token_ids[row].tolist(),
        )
        assert one.logprobs[0] == pytest.approx(at_one[row, token], abs=2e-6)
        assert (one.tempered is None) == (not params.shows_processed)
        expected = wanted64(logits.numpy()[row], params, token)
        assert one.shown_logprobs[0] == pytest.approx(expected[token], abs=5e-6)
        assert so_far(output, params).logprobs == pytest.approx((expected[token],), abs=5e-6)
        if k := params.topk_sample_logprobs:
            assert one.topk_ids is not None and one.topk_logprobs is not None
            assert one.topk_ids[0].tolist() == np.argsort(-at_one[row])[:k].tolist()
            np.testing.assert_allclose(one.topk_logprobs[0], np.sort(expected)[::-1][:k], atol=5e-6)


def test_a_logprob_that_the_worker_did_not_compute_is_an_error():
    params = PARAMS[0]
    output = answered(
        Sampler()(torch.randn(1, VOCABULARY), metadata((params,))).logprobs_tensors, 0, params
    )
    with pytest.raises(InternalError, match="no logprobs of the sampling distribution"):
        as_output(output, "base", params)


class SamplerOfTheSecondRunner:
    """The attributes of vLLM's GPU sampler that the patch uses; its kernels run on GPUs only."""

    def __init__(self, params: tuple[SamplingParams, ...]):
        self.sampling_states = SimpleNamespace(
            temperature=SimpleNamespace(gpu=torch.zeros(len(params))),
            top_k=SimpleNamespace(gpu=torch.zeros(len(params), dtype=torch.int32)),
            top_p=SimpleNamespace(gpu=torch.zeros(len(params))),
        )
        self.added: list[int] = []

    def add_request(self, place: int, params: Any) -> None:
        self.added.append(place)
        self.sampling_states.temperature.gpu[place] = params.temperature
        self.sampling_states.top_k.gpu[place] = params.top_k if params.top_k > 0 else VOCABULARY
        self.sampling_states.top_p.gpu[place] = params.top_p


def test_the_gpu_sampler_gives_the_same_logprobs(monkeypatch: pytest.MonkeyPatch):
    from vllm.v1.worker.gpu.sample import sampler as module

    def on_cpu(
        logits: torch.Tensor, num_logprobs: int, sampled: torch.Tensor, **_: Any
    ) -> LogprobsTensors:
        return Sampler().gather_logprobs(Sampler.compute_logprobs(logits), num_logprobs, sampled)

    monkeypatch.setattr(module, "compute_topk_scores", on_cpu)
    sampler = SamplerOfTheSecondRunner(PARAMS)
    assert vllm_processed.install(SimpleNamespace(sampler=sampler))
    places = torch.randperm(len(PARAMS), generator=torch.Generator().manual_seed(1))
    for row, place in enumerate(places.tolist()):
        sampler.add_request(place, vllm_params(PARAMS[row]))
    assert sorted(sampler.added) == list(range(len(PARAMS)))
    logits, sampled = torch.randn(len(PARAMS), VOCABULARY), torch.arange(len(PARAMS))
    found = module.compute_topk_scores(logits, 4, sampled, expanded_idx_mapping=places.int())
    for row, params in enumerate(PARAMS):
        (one,) = as_output(answered(found, row, params), "base", params).sequences
        own = wanted64(logits.numpy()[row], params, row)
        assert one.shown_logprobs[0] == pytest.approx(own[row], abs=5e-6)
    sampler.add_request(int(places[0]), vllm_params(SamplingParams(max_tokens=1)))  # reuses a place
    again = module.compute_topk_scores(logits, 4, sampled, expanded_idx_mapping=places.int())
    assert PROCESSED not in again.logprob_token_ids[0] and PROCESSED in again.logprob_token_ids[1]


def test_an_unknown_sampler_is_not_patched():
    assert not vllm_processed.install(SimpleNamespace(sampler=object()))


@pytest.mark.parametrize("prefix", ["metaspace", "bytes"])
def test_a_stop_text_with_tempered_logprobs_does_not_end_the_engine(prefix: str):
    """With stop texts vLLM decodes logprob ids; some tokenizers fail beyond their vocabulary."""
    fast = Tokenizer(models.WordLevel({"<unk>": 0, "\u2581a": 1, "b": 2}, unk_token="<unk>"))
    if prefix == "metaspace":
        fast.pre_tokenizer, fast.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast)
    vllm_processed.take_marked_ids()
    vllm_processed.take_marked_ids()
    spelled = logprobs.convert_ids_list_to_tokens(tokenizer, [1, PROCESSED, 2])
    assert len(spelled) == 3 and "a" in spelled[0] and spelled[2] == "b"
