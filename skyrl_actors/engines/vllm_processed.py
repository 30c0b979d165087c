"""Logprobs of the distribution that a sample comes from, besides the model's, from vLLM workers.

vLLM gives logprobs of one kind for a whole engine. A request that sets `extra_args[FLAG]` gets one
more entry after the logprob of each sampled token. The entry has the id `PROCESSED`. Its value is
the token's log softmax(logits / temperature), restricted by top_k and top_p unless the flag is
`TEMPERATURE_ONLY`. The request asks vLLM for one more top token, which reserves the place of the
entry.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skyrl_actors.engines.interface import FLAG, PROCESSED
from skyrl_actors.losses.truncation import floors, truncate_

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
    """Let vLLM's output process accept the id `PROCESSED`.

    vLLM decodes every logprob's id if a sample has stop texts. With some tokenizers it fails on an
    id beyond the vocabulary, which ends all samples of the engine.
    """
    module: Any = importlib.import_module("vllm.v1.engine.logprobs")
    if getattr(module.convert_ids_list_to_tokens, "takes_marked_ids", False):
        return
    spell = module.convert_ids_list_to_tokens

    def spelled(tokenizer: Any, ids: list[int]) -> list[str]:
        return spell(tokenizer, [0 if each == PROCESSED else each for each in ids])

    spelled.takes_marked_ids = True  # type: ignore[attr-defined]
    module.convert_ids_list_to_tokens = spelled


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What the R rows of a batch ask for."""

    wanted: Tensor  # [R] bool
    temperatures: Tensor  # [R] float32
    top_k: Tensor  # [R] int64, 0: off
    top_p: Tensor  # [R] float32

    def scaled(self, logits: Tensor) -> Tensor:
        """Return a copy: log softmax(logits) / temperature. `logits` is [R, V]."""
        return logits.float().log_softmax(-1) / self.temperatures.unsqueeze(1)

    def normalizers(self, scaled: Tensor, sampled: Tensor) -> Tensor:
        """Return [R]: what to subtract from logprob / temperature.

        `scaled` is overwritten. `sampled` [R] are the sampled ids, which are never left out.
        """
        rows = (self.wanted & ((self.top_k > 0) | (self.top_p < 1))).nonzero()[:, 0]
        if len(rows):
            own = scaled[rows]
            least = floors(own, self.top_k[rows], self.top_p[rows])
            scaled[rows] = truncate_(own, least, sampled[rows].long().unsqueeze(1))
        return scaled.logsumexp(-1)


def with_processed(found: Columns, rows: Rows, scaled: Tensor) -> Columns:
    """Insert the entry after the sampled token's in wanted rows; the row's last entry drops."""
    subtracted = rows.normalizers(scaled, found.logprob_token_ids[:, 0])
    ids, logprobs = found.logprob_token_ids.clone(), found.logprobs.clone()
    ids[:, 2:], logprobs[:, 2:] = found.logprob_token_ids[:, 1:-1], found.logprobs[:, 1:-1]
    ids[:, 1] = PROCESSED
    logprobs[:, 1] = found.logprobs[:, 0] / rows.temperatures - subtracted
    wanted = rows.wanted.unsqueeze(1)
    return found._replace(
        logprob_token_ids=torch.where(wanted, ids, found.logprob_token_ids),
        logprobs=torch.where(wanted, logprobs, found.logprobs),
    )


def _install_v1(runner: Any, sampler: Any) -> None:
    original = sampler.forward

    def forward(logits: Tensor, sampling_metadata: Any, *arguments: Any, **named: Any) -> Any:
        params = [runner.requests[each].sampling_params for each in runner.input_batch.req_ids]
        asking = [_flag(each) for each in params]
        if sampling_metadata.temperature is None or len(asking) != len(logits) or not any(asking):
            return original(logits, sampling_metadata, *arguments, **named)
        rows = Rows(
            wanted=torch.tensor([bool(flag) for flag in asking], device=logits.device),
            temperatures=_positive(sampling_metadata.temperature[: len(logits)]),
            top_k=torch.tensor(
                [
                    each.top_k if flag is True else 0
                    for each, flag in zip(params, asking, strict=True)
                ],
                device=logits.device,
            ).clamp(min=0),
            top_p=torch.tensor(
                [
                    each.top_p if flag is True else 1.0
                    for each, flag in zip(params, asking, strict=True)
                ],
                device=logits.device,
            ),
        )
        # Computed before vLLM divides the logits in place.
        scaled = rows.scaled(logits)
        output = original(logits, sampling_metadata, *arguments, **named)
        output.logprobs_tensors = with_processed(output.logprobs_tensors, rows, scaled)
        return output

    sampler.forward = forward


def _install_v2(sampler: Any) -> None:
    module: Any = importlib.import_module("vllm.v1.worker.gpu.sample.sampler")
    states, add_request, original = (
        sampler.sampling_states,
        sampler.add_request,
        module.compute_topk_scores,
    )
    asking: dict[int, Any] = {}  # the flag by place in the batch

    def added(place: int, params: Any) -> None:
        add_request(place, params)
        asking.pop(place, None)
        if flag := _flag(params):
            asking[place] = flag

    def scores(
        logits: Tensor, *arguments: Any, expanded_idx_mapping: Tensor, **named: Any
    ) -> Columns:
        found = original(logits, *arguments, expanded_idx_mapping=expanded_idx_mapping, **named)
        if not asking or found.logprobs.shape[1] < 2:
            return found
        places = expanded_idx_mapping.long()
        limited = _among(places, [place for place, flag in asking.items() if flag is True])
        rows = Rows(
            wanted=_among(places, list(asking)),
            temperatures=_positive(states.temperature.gpu[places]),
            top_k=torch.where(limited, states.top_k.gpu[places].long(), 0),
            top_p=torch.where(limited, states.top_p.gpu[places], 1.0),
        )
        return with_processed(found, rows, rows.scaled(logits))

    sampler.add_request, module.compute_topk_scores = added, scores


def _among(places: Tensor, wanted: list[int]) -> Tensor:
    return torch.isin(places, torch.tensor(wanted, dtype=places.dtype, device=places.device))


def _flag(params: Any) -> Any:
    """Return True, `TEMPERATURE_ONLY`, or a false value for a request that does not ask."""
    return params is not None and params.extra_args and params.extra_args.get(FLAG)


def _positive(temperatures: Tensor) -> Tensor:
    """Replace the temperature 0 of greedy rows by 1."""
    return torch.where(temperatures > 0, temperatures, 1.0)
