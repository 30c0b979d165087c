"""Convert sampling parameters to vLLM's, and vLLM's outputs to sample outputs."""

import math
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm import SamplingParams as VllmSamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from skyrl_actors.engines.interface import FLAG, PROCESSED, TEMPERATURE_ONLY
from skyrl_actors.engines.prompt_scores import EMPTY_CELL, LEAST_TEMPERATURE, prompt_scores
from skyrl_actors.engines.routed_experts import RoutedExperts
from skyrl_actors.messages.errors import InternalError
from skyrl_actors.messages.requests import SamplingParams, Shaping
from skyrl_actors.messages.results import PartialSample, SampleOutput, Sequence

LEAST_BIAS = -100.0  # vLLM takes no smaller one
NOT_SHAPED = Shaping()


def vllm_params(params: SamplingParams, never: int | None = None) -> VllmSamplingParams:
    """Return vLLM's parameters. It decodes text only when stop texts need it.

    `never`: a token that is not sampled.
    """
    stop = params.stop
    texts = [s for s in stop or () if isinstance(s, str)]
    ids = [s for s in stop or () if isinstance(s, int)]
    prompt_logprobs = None
    if params.prompt_logprobs or params.topk_prompt_logprobs:
        prompt_logprobs = params.topk_prompt_logprobs
    if params.scores_prompt:
        prompt_logprobs = -1
    shaping = params.shaping or NOT_SHAPED
    bias = dict(shaping.logit_bias)
    if never is not None:
        bias[never] = LEAST_BIAS
    return VllmSamplingParams(
        n=params.num_samples,
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k if params.top_k > 0 else 0,
        top_p=params.top_p,
        min_p=shaping.min_p,
        frequency_penalty=shaping.frequency_penalty,
        presence_penalty=shaping.presence_penalty,
        repetition_penalty=shaping.repetition_penalty,
        structured_outputs=_structured(shaping.json_schema),
        seed=params.seed,
        stop=texts or None,
        stop_token_ids=ids or None,
        ignore_eos=stop is not None and not params.stop_at_end_too,
        detokenize=bool(texts),
        skip_special_tokens=False,  # a stop text can be one
        logprobs=params.topk_sample_logprobs + params.processes,
        extra_args={FLAG: params.processed_logprobs or TEMPERATURE_ONLY}
        if params.processes
        else None,
        prompt_logprobs=prompt_logprobs,
        logit_bias=bias or None,
        output_kind=RequestOutputKind.CUMULATIVE if params.stream else RequestOutputKind.FINAL_ONLY,
    )


def _structured(schema: str | None) -> StructuredOutputsParams | None:
    if schema is None:
        return None
    return (
        StructuredOutputsParams(json=schema)
        if schema
        else StructuredOutputsParams(json_object=True)
    )


def as_output(
    output: Any, version: str, params: SamplingParams, routed: RoutedExperts | None = None
) -> SampleOutput:
    """Convert an output of vLLM, with the experts of its tokens if `routed` is given.

    Raises InternalError unless samples ended by stop or length.
    """
    sequences = []
    for choice in output.outputs:
        if choice.finish_reason not in ("stop", "length"):
            raise InternalError(f"vLLM ended a sample with {choice.finish_reason!r}")
        tokens = np.asarray(choice.token_ids, np.int32)
        logprobs, shown = _logprobs(choice), _processed(choice) if params.processes else None
        best: tuple[Any, Any] = (None, None)
        if k := params.topk_sample_logprobs:
            rows = [
                {token: entry for token, entry in step.items() if token != PROCESSED}
                for step in choice.logprobs
            ]
            best = _best(rows, k)
            if shown is not None:
                best = best[0], _at_temperature(best[1], logprobs, shown, params.temperature)
        if params.shows_processed and shown is None:
            shown = logprobs
        sequences.append(
            Sequence(
                tokens=tokens,
                logprobs=logprobs,
                stop_reason=choice.finish_reason,
                topk_ids=best[0],
                topk_logprobs=best[1],
                tempered=shown,
                routes=routed.of(choice) if routed else None,
            )
        )
    of_prompt: dict[str, Any] = {}
    if output.prompt_logprobs is not None:
        kept = (
            len(output.prompt_token_ids)
            if params.prompt_logprobs_last_n is None
            else params.prompt_logprobs_last_n
        )
        rows = [
            row if i >= len(output.prompt_logprobs) - kept else None
            for i, row in enumerate(output.prompt_logprobs)
        ]
        if params.prompt_logprobs or params.topk_prompt_logprobs:
            of_prompt = _prompt_fields(output.prompt_token_ids, rows, params.topk_prompt_logprobs)
        if params.scores_prompt:
            of_prompt |= prompt_scores(
                np.asarray([dense(row) for row in output.prompt_logprobs[1:]]), params
            )
    return SampleOutput(
        sequences=tuple(sequences),
        version=version,
        cached_tokens=output.num_cached_tokens or 0,
        **of_prompt,
    )


def weight_versions(output: Any) -> set[str]:
    """Return the full-weight versions that vLLM recorded for the output's tokens."""
    return {span.version for choice in output.outputs for span in choice.weight_versions or ()}


def so_far(output: Any, params: SamplingParams) -> PartialSample:
    """Return the tokens and logprobs of a cumulative output of one sample."""
    (choice,) = output.outputs
    logprobs = _processed(choice) if params.processes else _logprobs(choice)
    return PartialSample(tuple(choice.token_ids), tuple(logprobs.tolist()))


def _logprobs(choice: Any) -> NDArray[np.float32]:
    found = [
        step[token].logprob for step, token in zip(choice.logprobs, choice.token_ids, strict=True)
    ]
    return np.asarray(found, np.float32)


def _processed(choice: Any) -> NDArray[np.float32]:
    """Return logprobs of the sampling distribution. Raise InternalError if vLLM gave none."""
    try:
        return np.asarray([step[PROCESSED].logprob for step in choice.logprobs], np.float32)
    except KeyError:
        raise InternalError("vLLM gave no logprobs of the sampling distribution") from None


def _at_temperature(
    best: NDArray[np.float32],
    logprobs: NDArray[np.float32],
    shown: NDArray[np.float32],
    temperature: float,
) -> NDArray[np.float32]:
    """Convert the best tokens' logprobs [R, K] to the sample's temperature.

    At one position, dividing by the temperature shifts all logprobs by the same constant.
    """
    moved = shown[:, None] + (best - logprobs[:, None]) / max(temperature, LEAST_TEMPERATURE)
    return np.where(best == EMPTY_CELL[1], best, moved).astype(np.float32)


def _prompt_fields(prompt: SequenceOf[int], rows: SequenceOf[Any], k: int) -> dict[str, Any]:
    """Return [P] logprobs of the prompt's own tokens, the first NaN.

    With k > 0, also return the k most likely tokens of each position.
    """
    own = [
        math.nan if row is None else row[token].logprob
        for token, row in zip(prompt, rows, strict=True)
    ]
    fields: dict[str, Any] = {"prompt_logprobs": np.asarray(own, np.float32)}
    if k:
        fields["topk_prompt_ids"], fields["topk_prompt_logprobs"] = _best(rows, k)
    return fields


def _best(rows: SequenceOf[Any], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return ids and logprobs of the k most likely tokens of each position, best first.

    Both are [P, k]. vLLM adds the sampled token to a row if it is not among the k; it is cut here.
    """
    best = [sorted((-e.logprob, e.rank, t) for t, e in (row or {}).items())[:k] for row in rows]
    padded = [
        [(t, -negated) for negated, _, t in row] + [EMPTY_CELL] * (k - len(row)) for row in best
    ]
    ids = np.asarray([[t for t, _ in row] for row in padded], np.int32)
    return ids, np.asarray([[lp for _, lp in row] for row in padded], np.float32)


def dense(row: Any) -> NDArray[np.float32]:
    """Return [V] logprobs of a position whose row holds the whole vocabulary."""
    values = np.full(max(row) + 1, -np.inf, np.float32)
    values[list(row)] = [entry.logprob for entry in row.values()]
    return values
