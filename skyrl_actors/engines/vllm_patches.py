"""Patches for defects of vLLM 0.32 that give wrong numbers. Other releases are not patched.

* Tied heads (CPU): after a weight update, a tied lm_head keeps its old packed embedding.
* CPU LoRA rows: a row without adapter is computed with the last adapter's slot (upstream PRs 48421,
  49656). Each token also gathers its own copy of A and B, which is slow.
* Prompt logprobs with an adapter on lm_head: vLLM reads the adapter of each row from the batch's
  sampling rows. Those are other rows (same family as upstream issue 29955). Both model runners, V1
  and V2, have this defect.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import vllm
from torch import Tensor, nn

AFFECTED = vllm.__version__.startswith("0.32.")
LogitsFn = Callable[..., Any]


def apply(model_runner: Any) -> list[str]:
    """Patch a worker with LoRA enabled; return the names of the applied patches."""
    if not AFFECTED or model_runner.lora_config is None:
        return []
    applied = ["prompt_logprobs_lora_rows"]
    _use_rows_of_prompts(model_runner)
    if torch.device(model_runner.device).type == "cpu":
        _patch_cpu_lora()
        applied.append("cpu_lora_rows")
    return applied


def repack_tied_heads(model: nn.Module) -> int:
    """Repack every vocabulary layer that shares its weight with another; return the count."""
    if not AFFECTED:
        return 0
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    shared: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            shared.setdefault(weight_of(module).data_ptr(), []).append(module)
    packed = [module for group in shared.values() if len(group) > 1 for module in group]
    for module in packed:
        dispatch_cpu_unquantized_gemm(module, remove_weight=False)
    return len(packed)


def weight_of(module: nn.Module) -> Tensor:
    """Return a layer's weight with its type, which `nn.Module` does not declare."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def _use_rows_of_prompts(runner: Any) -> None:
    """Patch the method of either model runner that computes the logprobs of prompts."""
    wrappers = _punica_wrappers(runner)
    if hasattr(runner, "_get_prompt_logprobs_dict"):  # V1
        runner._get_prompt_logprobs_dict = _v1_prompt_logprobs(runner, wrappers)
        return
    worker = runner.prompt_logprobs_worker  # V2
    for name in ("compute_prompt_logprobs", "compute_prompt_token_id_logprobs"):
        setattr(worker, name, _v2_prompt_logprobs(getattr(worker, name), wrappers))


def _v1_prompt_logprobs(runner: Any, wrappers: list[Any]) -> Callable[..., dict[str, Any]]:
    original = runner._get_prompt_logprobs_dict

    def by_token(hidden_states: Tensor, *arguments: Any) -> dict[str, Any]:
        model = runner.model
        with _adapters_of_tokens(model.compute_logits, hidden_states, wrappers) as logits_of:
            model.compute_logits = logits_of
            try:
                return original(hidden_states, *arguments)
            finally:
                del model.compute_logits  # the method of its class remains

    return by_token


def _v2_prompt_logprobs(
    original: Callable[..., dict[str, Any]], wrappers: list[Any]
) -> Callable[..., dict[str, Any]]:
    def by_token(logits_fn: LogitsFn, hidden_states: Tensor, *arguments: Any) -> dict[str, Any]:
        with _adapters_of_tokens(logits_fn, hidden_states, wrappers) as logits_of:
            return original(logits_of, hidden_states, *arguments)

    return by_token


@contextmanager
def _adapters_of_tokens(
    compute_logits: LogitsFn, hidden_states: Tensor, wrappers: list[Any]
) -> Iterator[LogitsFn]:
    """Give a function that computes logits of rows of `hidden_states` [tokens, hidden].

    Each row is computed with the adapter of its token. Afterwards the wrappers have the rows of
    the batch's samples again.
    """
    changed = False

    def logits_of(rows: Tensor, *arguments: Any, **named: Any) -> Any:
        nonlocal changed
        changed = True
        skipped = int(rows.storage_offset()) - int(hidden_states.storage_offset())
        first = skipped // hidden_states.stride(0)
        for wrapper in wrappers:
            _set_sampler_rows(wrapper, wrapper._token_lora_indices[first : first + len(rows)])
        return compute_logits(rows, *arguments, **named)

    saved = [(w, w.indices_len[1], w._sampler_indices.clone()) for w in wrappers]
    try:
        yield logits_of
    finally:
        for wrapper, length, values in saved if changed else ():
            wrapper._sampler_indices.copy_(values)
            _set_sampler_rows(wrapper, wrapper._sampler_indices[:length])


def _set_sampler_rows(wrapper: Any, slots: Tensor) -> None:
    """Set the adapter slot of each row of logits; -1 is none."""
    wrapper._sampler_indices[: len(slots)] = slots
    wrapper.indices_len[1] = len(slots)
    meta = getattr(wrapper, "prompt_mapping_meta", None)
    if meta is not None:  # GPUs: the kernels read a sorted copy
        meta.prepare_tensors(slots)


def _punica_wrappers(runner: Any) -> list[Any]:
    adapters = runner.lora_manager._adapter_manager
    mapping = getattr(adapters, "punica_wrapper_mapping", None) or {0: adapters.punica_wrapper}
    return list({id(w): w for w in mapping.values() if w is not None}.values())


def _patch_cpu_lora() -> None:
    punica: Any = importlib.import_module("vllm.lora.punica_wrapper.punica_cpu")

    def shrink(
        inputs: Tensor, a_all: Tensor, output: Tensor, slots: Tensor, scaling: float = 1.0
    ) -> None:
        for slot, rows in _by_adapter(slots, inputs.shape[0]):
            a = _slot_weight(a_all, slot).to(output.dtype)
            output[rows, : a.shape[0]] = scaling * (inputs[rows].to(output.dtype) @ a.t())

    def expand(
        inputs: Tensor, b_all: Tensor, output: Tensor, slots: Tensor, add_inputs: bool = True
    ) -> None:
        expand_slice(inputs, b_all, output, slots, 0, output.shape[1], add_inputs)

    def expand_slice(
        inputs: Tensor,
        b_all: Tensor,
        output: Tensor,
        slots: Tensor,
        start: int,
        size: int,
        add_inputs: bool = True,
    ) -> None:
        for slot, rows in _by_adapter(slots, inputs.shape[0]):
            b = _slot_weight(b_all, slot).to(output.dtype)
            width = min(size, b.shape[0])
            update = (inputs[rows].to(output.dtype) @ b.t())[:, :width]
            columns = slice(start, start + width)
            output[rows, columns] = output[rows, columns] + update if add_inputs else update

    punica.bgmv_shrink, punica.bgmv_expand, punica.bgmv_expand_slice = shrink, expand, expand_slice
    punica.sgmv_shrink, punica.sgmv_expand, punica.sgmv_expand_slice = map(
        _for_prefill, (shrink, expand, expand_slice)
    )


def _by_adapter(slots: Tensor, num_rows: int) -> Iterator[tuple[int, Tensor | slice]]:
    present = torch.unique(slots).tolist()
    for slot in present:
        if slot >= 0:
            everything = len(present) == 1 and (slots.numel() == num_rows or slots.numel() == 1)
            yield slot, slice(None) if everything else (slots == slot).nonzero(as_tuple=True)[0]


def _slot_weight(stacked: Tensor, slot: int) -> Tensor:
    weight = stacked[slot]
    return weight.squeeze(0) if weight.dim() == 3 else weight


def _for_prefill(operation: Callable[..., None]) -> Callable[..., None]:
    """Adapt an operation to prefill, which names one adapter and length for each sequence."""

    def by_sequence(
        inputs: Tensor,
        weights: Tensor,
        output: Tensor,
        starts: Tensor,
        lengths: Tensor,
        slots: Tensor,
        batches: int,
        longest: int,
        tokens: int,
        *rest: Any,
    ) -> None:
        operation(inputs, weights, output, torch.repeat_interleave(slots, lengths), *rest)

    return by_sequence
