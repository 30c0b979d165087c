"""Logprobs at the temperature of a sample, besides those at temperature 1, from vLLM workers.

vLLM gives logprobs of one kind for a whole engine. A request that sets `extra_args[FLAG]` gets one
more entry after the logprob of each sampled token. The entry has the id `TEMPERED` and the value
log softmax(logits / temperature) of that token, before top_k and top_p. The request asks vLLM for
one more top token, which reserves the place of the entry.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from skyrl_actors.engines.interface import FLAG, TEMPERED

Columns = Any  # vllm.v1.outputs.LogprobsTensors


def install(runner: Any) -> bool:
    """Patch the sampler of a vLLM 0.32 worker; return False for an unknown kind of sampler."""
    sampler = getattr(runner, "sampler", None)
    if hasattr(sampler, "sampling_states") and hasattr(sampler, "add_request"):
        _install_v2(sampler)
    elif hasattr(runner, "input_batch") and hasattr(sampler, "topk_topp_sampler"):
        _install_v1(runner, sampler)
    else:
        return False
    return True


def take_marked_ids() -> None:
    """Let vLLM's output process accept the id `TEMPERED`.

    vLLM decodes every logprob's id if a sample has stop texts. With some tokenizers it fails on an
    id beyond the vocabulary, which ends all samples of the engine.
    """
    module: Any = importlib.import_module("vllm.v1.engine.logprobs")
    if getattr(module.convert_ids_list_to_tokens, "takes_marked_ids", False):
        return
    spell = module.convert_ids_list_to_tokens

    def spelled(tokenizer: Any, ids: list[int]) -> list[str]:
        return spell(tokenizer, [0 if each == TEMPERED else each for each in ids])

    spelled.takes_marked_ids = True  # type: ignore[attr-defined]
    module.convert_ids_list_to_tokens = spelled


def normalizers(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Return [R]: what to subtract from logprob / temperature. `logits` is [R, V]."""
    return (logits.float().log_softmax(-1) / temperatures.unsqueeze(1)).logsumexp(-1)


def with_tempered(
    found: Columns, wanted: Tensor, temperatures: Tensor, subtracted: Tensor
) -> Columns:
    """Insert the entry after the sampled token's in `wanted` rows; the row's last entry drops."""
    ids, logprobs = found.logprob_token_ids.clone(), found.logprobs.clone()
    ids[:, 2:], logprobs[:, 2:] = found.logprob_token_ids[:, 1:-1], found.logprobs[:, 1:-1]
    ids[:, 1] = TEMPERED
    logprobs[:, 1] = found.logprobs[:, 0] / temperatures - subtracted
    rows = wanted.unsqueeze(1)
    return found._replace(
        logprob_token_ids=torch.where(rows, ids, found.logprob_token_ids),
        logprobs=torch.where(rows, logprobs, found.logprobs),
    )


def _install_v1(runner: Any, sampler: Any) -> None:
    original = sampler.forward

    def forward(logits: Tensor, sampling_metadata: Any, *arguments: Any, **named: Any) -> Any:
        asking = [
            _wants_tempered(runner.requests[each].sampling_params)
            for each in runner.input_batch.req_ids
        ]
        if sampling_metadata.temperature is None or len(asking) != len(logits) or not any(asking):
            return original(logits, sampling_metadata, *arguments, **named)
        temperatures = _positive(sampling_metadata.temperature[: len(logits)])
        # Computed before vLLM divides the logits in place.
        subtracted = normalizers(logits, temperatures)
        output = original(logits, sampling_metadata, *arguments, **named)
        wanted = torch.tensor(asking, device=logits.device)
        output.logprobs_tensors = with_tempered(
            output.logprobs_tensors, wanted, temperatures, subtracted
        )
        return output

    sampler.forward = forward


def _install_v2(sampler: Any) -> None:
    module: Any = importlib.import_module("vllm.v1.worker.gpu.sample.sampler")
    states, add_request, original = (
        sampler.sampling_states,
        sampler.add_request,
        module.compute_topk_scores,
    )
    asking: set[int] = set()  # places in the batch

    def added(place: int, params: Any) -> None:
        add_request(place, params)
        (asking.add if _wants_tempered(params) else asking.discard)(place)

    def scores(
        logits: Tensor, *arguments: Any, expanded_idx_mapping: Tensor, **named: Any
    ) -> Columns:
        found = original(logits, *arguments, expanded_idx_mapping=expanded_idx_mapping, **named)
        if not asking:
            return found
        places = torch.tensor(sorted(asking), device=logits.device)
        temperatures = _positive(states.temperature.gpu[expanded_idx_mapping.long()])
        wanted = torch.isin(expanded_idx_mapping.long(), places)
        if found.logprobs.shape[1] < 2:
            return found
        return with_tempered(found, wanted, temperatures, normalizers(logits, temperatures))

    sampler.add_request, module.compute_topk_scores = added, scores


def _wants_tempered(params: Any) -> bool:
    return bool(params is not None and params.extra_args and params.extra_args.get(FLAG))


def _positive(temperatures: Tensor) -> Tensor:
    """Replace the temperature 0 of greedy rows by 1."""
    return torch.where(temperatures > 0, temperatures, 1.0)
