"""An engine starts only when it computes, and computes the same after a live weight update."""

import logging
from collections.abc import Sequence

import numpy as np
import pytest

from skyrl_actors.engines.check_prompt import fixed_prompt
from skyrl_actors.engines.reload_proof import prove_adapter, prove_reload
from skyrl_actors.messages.errors import ConfigError, InternalError
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import SampleOutput
from skyrl_actors.messages.weights import WeightManifest

BASE = (WeightManifest(version="base", kind="full", path="/base/model.safetensors", num_bytes=1),)
PROMPT = fixed_prompt(128, 64)


class Scripted:
    """Shift the scores by the next of `shifts` at each load, or raise an error in its place."""

    def __init__(
        self,
        shifts: Sequence[float | Exception] = (),
        dies: bool = False,
        adapter: float | Exception = 0.0,
    ):
        self._adapter = adapter
        self._shifts, self._shift, self._dies = list(shifts), 0.0, dies
        self.loads = 0

    async def sample(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        adapter: WeightManifest | None,
        version: str,
    ) -> SampleOutput:
        assert prompt == PROMPT and params.prompt_logprobs
        if self._dies:
            raise InternalError("EngineCore encountered an issue")
        change = self._adapter if adapter else 0.0
        if isinstance(change, Exception):
            raise change
        scores = np.linspace(-9, -1, len(prompt), dtype=np.float32) + np.float32(
            self._shift + change
        )
        return SampleOutput(sequences=(), version=version, prompt_logprobs=scores)

    async def load_full(self, version: str, parts: tuple[WeightManifest, ...]) -> float:
        assert parts == BASE
        self.loads += 1
        shift = self._shifts.pop(0)
        if isinstance(shift, Exception):
            raise shift
        self._shift = shift
        return 0.0


async def test_an_engine_whose_scores_survive_an_update_starts(
    caplog: pytest.LogCaptureFixture,
):
    logging.getLogger("skyrl_actors").propagate = True
    with caplog.at_level(logging.INFO, "skyrl_actors.engines.reload_proof"):
        engine = Scripted([1e-6])
        await prove_reload(engine, "Qwen3ForCausalLM", "float32", PROMPT, BASE)
    assert engine.loads == 1 and "a live update leaves Qwen3ForCausalLM as it was" in caplog.text


@pytest.mark.parametrize("shift", [0.08, float("nan")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_an_engine_whose_scores_change_is_refused(shift: float, dtype: str):
    wanted = (
        r"Qwen3MoeForCausalLM cannot be sampled here: after a live update .* differs .* "
        "Set lora.max_full_models=0"
    )
    with pytest.raises(ConfigError, match=wanted):
        await prove_reload(Scripted([shift]), "Qwen3MoeForCausalLM", dtype, PROMPT, BASE)


async def test_a_model_that_crashes_vllm_is_refused_by_name():
    with pytest.raises(
        ConfigError,
        match=r"computing Qwen3MoeForCausalLM fails in vLLM \(InternalError: EngineCore",
    ):
        await prove_reload(Scripted(dies=True), "Qwen3MoeForCausalLM", "float32", PROMPT, ())


async def test_a_model_that_vllm_computes_in_bfloat16_alone_is_refused_with_that_advice():
    engine = Scripted([InternalError("AssertionError: CPU GDN attention requires BF16.")])
    with pytest.raises(ConfigError, match=r"fails in vLLM .*; set engine\.dtype=bfloat16, use"):
        await prove_reload(engine, "Qwen3NextForCausalLM", "float32", PROMPT, BASE)


async def test_an_update_that_fails_is_refused():
    engine = Scripted([RuntimeError("left out 2 layer(s)")])
    with pytest.raises(
        ConfigError, match=r"a live weight update of X fails in vLLM \(RuntimeError: left out 2"
    ):
        await prove_reload(engine, "X", "float32", PROMPT, BASE)


async def test_with_adapters_only_nothing_is_loaded():
    engine = Scripted()
    await prove_reload(engine, "X", "float32", PROMPT, ())
    assert engine.loads == 0


ZEROS = WeightManifest(version="zeros", kind="lora", path="zeros", num_bytes=0)


@pytest.mark.parametrize("change", [0.08, InternalError("no Triton"), 1e-6])
async def test_an_engine_that_cannot_compute_adapters_is_refused(change: float | Exception):
    engine = Scripted(adapter=change)
    if change == 1e-6:
        return await prove_adapter(engine, "X", "float32", PROMPT, ZEROS)
    wanted = "X cannot be sampled with adapters here|computing X with an adapter .*no Triton"
    with pytest.raises(ConfigError, match=wanted):
        await prove_adapter(engine, "X", "float32", PROMPT, ZEROS)
