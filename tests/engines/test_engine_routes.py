"""Samples of a real engine bring the experts of their tokens: those of the trainer's routers."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import AutoTokenizer

from skyrl_actors.engines.routed_experts import RoutedExperts
from skyrl_actors.messages.columns import columns_from
from skyrl_actors.messages.errors import ConfigError, InvalidRequest
from skyrl_actors.messages.example import TARGETS, Example
from skyrl_actors.messages.model import LoraSpec
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import SampleOutput
from skyrl_actors.workers.replay_proof import seen_by_experts
from tests.engines.test_engine_families import CONFIGS, PROMPT, saved_model, trained
from tests.engines.test_vllm_start import engine_for, environment, saved
from tests.workers.strategy_runs import run

__all__ = ["environment"]  # a fixture
K = 2


def of_trainer(worker: Any, name: str, tokens: list[int]) -> NDArray[np.int64]:
    """Return what the trainer's routers choose, as sorted routes: [T, layers · k]."""
    inputs = np.asarray(tokens, np.int32)
    example = Example(inputs, {TARGETS: inputs, "weights": np.ones(len(inputs), np.float32)})
    with seen_by_experts(worker.models[name].network.routed) as seen:
        run(worker, [(name, columns_from([example]), None)], forward_only=True)
    return np.concatenate([indices.sort(-1)[0].numpy() for indices, _ in seen], -1) + 1


def sorted_routes(routes: NDArray[np.generic]) -> NDArray[np.int64]:
    """Sort the experts of each token and layer."""
    found = routes.astype(np.int64)
    return np.sort(found.reshape(len(found), -1, K), -1).reshape(len(found), -1)


def check(output: SampleOutput, worker: Any, name: str, prompt: tuple[int, ...]) -> None:
    for one in output.sequences:
        assert one.routes is not None and one.routes.dtype == np.uint8
        inputs = [*prompt, *one.tokens.tolist()[:-1]]
        np.testing.assert_array_equal(
            sorted_routes(one.routes), of_trainer(worker, name, inputs), strict=True
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-moe", "glm4-moe", "mixtral", "gpt-oss"])
async def test_the_engines_experts_are_the_trainers(name: str, tmp_path: Path, random_base: Path):
    """GLM 4's first layer has no experts."""
    base = saved(CONFIGS[name], tmp_path / "base")
    AutoTokenizer.from_pretrained(random_base).save_pretrained(base)
    worker, _ = trained(base, "a", LoraSpec(rank=4))
    (manifest,) = saved_model(worker, "a", tmp_path / "a")
    params = SamplingParams(max_tokens=9, num_samples=2, seed=3)
    updated = name != "gpt-oss"
    full: Any = trained(base, "full", None)[0] if updated else None
    options: dict[str, Any] = {"takes_full_weights": updated, "arguments": '{"block_size": 32}'}
    async with engine_for(base, router_replay=True, **options) as engine:
        prompts = {f"r{size}": PROMPT[:size] for size in (9, 20, 40)}

        async def sampled(turn: str) -> None:
            outputs = await asyncio.gather(
                *(
                    engine.sample(f"{turn}{key}", prompt, params, manifest, manifest.version)
                    for key, prompt in prompts.items()
                )
            )
            for output, prompt in zip(outputs, prompts.values(), strict=True):
                check(output, worker, "a", prompt)

        await sampled("first")
        again = await engine.sample("again", PROMPT, params, manifest, manifest.version)
        assert again.cached_tokens > 0
        check(again, worker, "a", PROMPT)
        await engine.sleep(1)
        await engine.wake("weights")
        await engine.wake("kv_cache")
        await sampled("awake")
        if updated:
            await engine.load_full("full@1", saved_model(full, "full", tmp_path / "full"))
            check(await engine.sample("f", PROMPT, params, None, "full@1"), full, "full", PROMPT)


@pytest.mark.slow
async def test_preempted_and_frozen_samples(tmp_path: Path, random_base: Path):
    """The KV cache takes one and a half samples, and the engine sleeps while they run."""
    base = saved(CONFIGS["qwen3-moe"], tmp_path / "base")
    AutoTokenizer.from_pretrained(random_base).save_pretrained(base)
    worker, _ = trained(base, "a", LoraSpec(rank=4))
    (manifest,) = saved_model(worker, "a", tmp_path / "a")
    options: dict[str, Any] = {"arguments": '{"block_size": 32}', "kv_cache_bytes": 7 * 2**15}
    params = SamplingParams(max_tokens=80, seed=3, stop=())
    async with engine_for(base, router_replay=True, keeps_in_flight=True, **options) as engine:
        preempted: list[int] = []
        record = engine._stats.record

        def recorded(scheduler: Any, iteration: Any, *rest: Any, **named: Any) -> None:
            preempted.append(iteration.num_preempted_reqs if iteration else 0)
            record(scheduler, iteration, *rest, **named)

        engine._stats.record = recorded  # type: ignore[method-assign]
        samples = [
            asyncio.ensure_future(
                engine.sample(f"r{size}", PROMPT[:size], params, manifest, manifest.version)
            )
            for size in (36, 38, 40)
        ]
        await asyncio.sleep(0.2)
        assert not any(sample.done() for sample in samples)
        await engine.sleep(1)
        await engine.wake("weights")
        await engine.wake("kv_cache")
        for size, sample in zip((36, 38, 40), samples, strict=True):
            output = await sample
            assert len(output.sequences[0].tokens) == 80
            check(output, worker, "a", PROMPT[:size])
        assert sum(preempted) > 0


@pytest.mark.slow
async def test_a_dense_model_is_refused(tmp_path: Path, random_base: Path):
    base = saved(CONFIGS["qwen2"], tmp_path / "base")
    AutoTokenizer.from_pretrained(random_base).save_pretrained(base)
    with pytest.raises(ConfigError, match=r"vLLM refuses this engine: .* only supports MoE models"):
        async with engine_for(base, router_replay=True):
            pass


def test_routes_leave_out_layers_without_experts():
    class Choice:
        routed_experts = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)

    found = RoutedExperts(layers=(1, 3), num_experts=24, k=3).of(Choice())
    wanted = [[4, 5, 6, 10, 11, 12], [16, 17, 18, 22, 23, 24]]
    np.testing.assert_array_equal(found, np.asarray(wanted, np.uint8), strict=True)


def test_256_experts_do_not_fit_a_byte():
    class Choice:
        routed_experts = np.asarray([[[255]]], np.uint8)

    found = RoutedExperts(layers=(0,), num_experts=256, k=1).of(Choice())
    np.testing.assert_array_equal(found, np.asarray([[256]], np.int16), strict=True)


def test_a_sample_with_too_many_routes_is_refused():
    routed = RoutedExperts(layers=tuple(range(58)), num_experts=256, k=8)
    params = SamplingParams(max_tokens=16_000, num_samples=16)
    routed.check(4_000, params)
    with pytest.raises(InvalidRequest, match="64 samples of up to 16000 tokens could have 11878"):
        routed.check(4_000, replace(params, num_samples=64))
