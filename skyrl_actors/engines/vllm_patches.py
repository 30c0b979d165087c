"""Patches for defects of vLLM 0.32 that give wrong numbers. Other releases are not patched.

* Tied heads (CPU): after a weight update, a tied lm_head keeps its old packed embedding.
* CPU LoRA rows: a row without adapter is computed with the last adapter's slot (upstream PRs 48421,
  49656). Each token also gathers its own copy of A and B, which is slow.
* Prompt logprobs with an adapter on lm_head: vLLM reads the adapter of each row from the batch's
  sampling rows. Those are other rows (same family as upstream issue 29955).
"""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import vllm
from torch import Tensor, nn

AFFECTED = vllm.__version__.startswith("0.32.")


def apply(model_runner: Any) -> list[str]:
    """Patch a worker with LoRA enabled; return the names of the applied patches."""
    if not AFFECTED or model_runner.lora_config is None:
        return []
    applied = ["prompt_logprobs_lora_rows"]
    model_runner._get_prompt_logprobs_dict = _prompt_logprobs_by_request(model_runner)
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


def _prompt_logprobs_by_request(runner: Any) -> Callable[..., dict[str, Any]]:
    original = runner._get_prompt_logprobs_dict
    wrappers = [w for w in _punica_wrappers(runner) if w is not None]

    def one_request_at_a_time(
        hidden_states: Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, Any]:
        pending = runner.num_prompt_logprobs
        results: dict[str, Any] = {}
        try:
            for request_id in list(pending):
                runner.num_prompt_logprobs = {request_id: pending[request_id]}
                scheduled = num_scheduled_tokens.get(request_id)
                rows = (
                    0
                    if scheduled is None
                    else _rows_with_logits(runner.requests[request_id], scheduled)
                )
                saved = (
                    [
                        _set_sampler_rows(w, _adapter_slot(runner, request_id), rows)
                        for w in wrappers
                    ]
                    if rows
                    else []
                )
                results |= original(hidden_states, num_scheduled_tokens)
                for wrapper, (length, values) in zip(wrappers, saved, strict=bool(saved)):
                    wrapper._sampler_indices[:rows] = values
                    wrapper.indices_len[1] = length
                if request_id not in runner.num_prompt_logprobs:
                    del pending[request_id]
        finally:
            runner.num_prompt_logprobs = pending
        return results

    return one_request_at_a_time


def _rows_with_logits(request: Any, scheduled_tokens: int) -> int:
    remaining = len(request.prompt_token_ids) - request.num_computed_tokens - 1
    return max(0, min(scheduled_tokens, remaining))


def _punica_wrappers(runner: Any) -> list[Any]:
    adapters = runner.lora_manager._adapter_manager
    mapping = getattr(adapters, "punica_wrapper_mapping", None)
    return (
        list({id(w): w for w in mapping.values()}.values())
        if mapping
        else [adapters.punica_wrapper]
    )


def _adapter_slot(runner: Any, request_id: str) -> int:
    adapter_id = int(
        runner.input_batch.request_lora_mapping[runner.input_batch.req_id_to_index[request_id]]
    )
    slots = runner.lora_manager._adapter_manager.lora_index_to_id
    return slots.index(adapter_id) if adapter_id else -1


def _set_sampler_rows(wrapper: Any, slot: int, rows: int) -> tuple[int | None, Tensor]:
    saved = wrapper.indices_len[1], wrapper._sampler_indices[:rows].clone()
    wrapper._sampler_indices[:rows] = slot
    wrapper.indices_len[1] = rows
    return saved


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
