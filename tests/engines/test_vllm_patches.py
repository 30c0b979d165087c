"""Prompt logprobs with adapters on the output layer, with vLLM's own classes of both runners."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm.lora.layers import LoRAMapping
from vllm.lora.ops.triton_ops import LoRAKernelMeta
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample import prompt_logprob

from skyrl_actors.engines import vllm_patches

HIDDEN, RANK, VOCABULARY, SLOTS = 6, 2, 11, 3
LENGTHS, ADAPTERS = (5, 3, 4), (20, 0, 10)  # of three prompts in one batch; 0: no adapter
SLOT_IDS = [10, None, 20]


class Head:
    """An output layer with adapters in slots, computed by vLLM's wrapper for CPUs."""

    def __init__(self, wrapper: PunicaWrapperCPU):
        made = torch.Generator().manual_seed(0)
        self.wrapper = wrapper
        self.base = torch.randn(VOCABULARY, HIDDEN, generator=made)
        self.a = torch.randn(SLOTS, 1, RANK, HIDDEN, generator=made)
        self.b = torch.randn(SLOTS, 1, VOCABULARY, RANK, generator=made)

    def compute_logits(self, rows: Tensor) -> Tensor:
        logits = rows @ self.base.t()
        self.wrapper.add_lora_logits(logits, rows, self.a, self.b, 1.0)
        return logits

    def expected(self, rows: Tensor, slot: int) -> Tensor:
        weight = self.base.double()
        if slot >= 0:
            weight = weight + self.b[slot, 0].double() @ self.a[slot, 0].double()
        return (rows.double() @ weight.t()).log_softmax(-1)


def make() -> tuple[Any, Tensor]:
    """Return what both runners have in common, and hidden states, during a prefill."""
    wrapper = PunicaWrapperCPU(32, 4, "cpu")
    tokens = [a for a, length in zip(ADAPTERS, LENGTHS, strict=True) for _ in range(length)]
    mapping = LoRAMapping(tuple(tokens), ADAPTERS, is_prefill=True)
    wrapper.update_metadata(mapping, SLOT_IDS, SLOTS, VOCABULARY)
    manager = SimpleNamespace(punica_wrapper=wrapper)
    runner = SimpleNamespace(
        lora_config=object(),
        device="cpu",
        model=Head(wrapper),
        lora_manager=SimpleNamespace(_adapter_manager=manager),
    )
    hidden = torch.randn(sum(LENGTHS), HIDDEN, generator=torch.Generator().manual_seed(1))
    return runner, hidden


def check(runner: Any, hidden: Tensor, found: dict[str, Tensor]) -> None:
    starts = np.cumsum((0, *LENGTHS))
    for row, adapter in enumerate(ADAPTERS):
        rows = hidden[starts[row] : starts[row] + LENGTHS[row] - 1]
        slot = SLOT_IDS.index(adapter) if adapter else -1
        expected = runner.model.expected(rows, slot)
        torch.testing.assert_close(found[f"r{row}"].double(), expected, rtol=1e-5, atol=1e-5)
    # The rows of samples are those of the batch again.
    wrapper = runner.model.wrapper
    assert wrapper.sampler_indices.tolist() == [2, -1, 0]


@pytest.fixture(autouse=True)
def grouped_cpu_lora(monkeypatch: pytest.MonkeyPatch):
    """Undo what the patch changes in vLLM's module."""
    from vllm.lora.punica_wrapper import punica_cpu

    for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"):
        monkeypatch.setattr(punica_cpu, name, getattr(punica_cpu, name))
    for name in ("sgmv_shrink", "sgmv_expand", "sgmv_expand_slice"):
        monkeypatch.setattr(punica_cpu, name, getattr(punica_cpu, name))


def test_v1_prompt_logprobs_use_the_adapter_of_each_token():
    runner, hidden = make()

    def original(states: Tensor, _: dict[str, int]) -> dict[str, Tensor]:
        starts, found = np.cumsum((0, *LENGTHS)), dict[str, Tensor]()
        for row, length in enumerate(LENGTHS):
            rows = states[starts[row] : starts[row] + length - 1]
            found[f"r{row}"] = runner.model.compute_logits(rows).log_softmax(-1)
        return found

    runner._get_prompt_logprobs_dict = original
    assert "prompt_logprobs_lora_rows" in vllm_patches.apply(runner)
    check(runner, hidden, runner._get_prompt_logprobs_dict(hidden, {}))
    assert "compute_logits" not in vars(runner.model)


def test_v2_prompt_logprobs_use_the_adapter_of_each_token(monkeypatch: pytest.MonkeyPatch):
    """The runner that vLLM chooses where Triton works; its two Triton kernels run in torch."""
    runner, hidden = make()

    def every_logprob(logits: Tensor, count: int, ids: Tensor, **_: Any) -> LogprobsTensors:
        logprobs = logits.log_softmax(-1)
        return LogprobsTensors(ids.unsqueeze(1).expand_as(logprobs), logprobs, ids)

    monkeypatch.setattr(prompt_logprob, "compute_topk_scores", every_logprob)
    monkeypatch.setattr(
        prompt_logprob,
        "get_prompt_logprobs_token_ids",
        lambda count, *rest: torch.zeros(count, dtype=torch.int64),
    )
    monkeypatch.setattr(prompt_logprob, "CHUNK_SIZE", 4)  # no boundary of a prompt
    worker: Any = prompt_logprob.PromptLogprobsWorker(4, torch.device("cpu"))
    for row in range(len(LENGTHS)):
        asked = SimpleNamespace(
            prompt_logprobs=-1, prompt_logprob_token_ids=None, prompt_logprob_start=None
        )
        worker.add_request(f"r{row}", row, asked)
    runner.prompt_logprobs_worker = worker
    batch = SimpleNamespace(
        req_ids=["r0", "r1", "r2"],
        idx_mapping_np=np.arange(3),
        idx_mapping=torch.arange(3),
        num_computed_prefill_tokens_np=np.zeros(3, int),
        prefill_len_np=np.array(LENGTHS),
        num_scheduled_tokens=np.array(LENGTHS),
        num_tokens=sum(LENGTHS),
        query_start_loc=None,
        query_start_loc_np=np.cumsum((0, *LENGTHS)),
    )
    assert "prompt_logprobs_lora_rows" in vllm_patches.apply(runner)
    found = worker.compute_prompt_logprobs(
        runner.model.compute_logits, hidden, batch, None, None, np.array(LENGTHS)
    )
    check(runner, hidden, {name: each.logprobs for name, each in found.items()})


def test_kernels_of_a_gpu_get_the_slots_of_the_rows():
    wrapper: Any = PunicaWrapperCPU(32, 4, "cpu")
    wrapper.prompt_mapping_meta = LoRAKernelMeta.make(SLOTS, 32, "cpu")
    vllm_patches._set_sampler_rows(wrapper, torch.tensor([2, -1, 2, 0]))
    meta = wrapper.prompt_mapping_meta
    assert meta.token_lora_mapping[:4].tolist() == [2, -1, 2, 0]
    assert meta.token_indices_sorted_by_lora_ids[:4].tolist() == [1, 3, 0, 2]
    assert not meta.no_lora_flag_cpu.item()


IMPORTS = """
import torch
def seen():
    return [
        {name: getattr(holder, name) for name in dir(holder) if not name.startswith("_")}
        for holder in (torch.cuda, torch.Tensor)
    ]
before = seen()
from skyrl_actors.engines import actor, vllm_engine, worker_ext
from skyrl_actors.groups import worker_actor
from skyrl_actors.workers import torch_worker, fsdp2
for name, old, new in zip(("torch.cuda", "Tensor"), before, seen()):
    print(*(f"{name}.{key}" for key in old if old[key] is not new.get(key)))
"""


@pytest.mark.slow
def test_imports_of_a_gpu_process_leave_torch_cuda_as_it_was():
    """vLLM's CPU worker replaces streams, events and pinning of the whole process."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True
    )
    # vLLM wraps `set_stream` to record the stream, and calls the original.
    assert done.stdout.split() == ["torch.cuda.set_stream"]
