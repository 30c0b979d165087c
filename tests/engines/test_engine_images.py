"""Real vLLM on a CPU with images in its prompts agrees with the trainer."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from skyrl_actors.api.pictures import PictureReader, Row
from skyrl_actors.config.limits import LimitsConfig
from skyrl_actors.config.strategies import ReplicaStrategy
from skyrl_actors.engines.check_image import pictures_in
from skyrl_actors.engines.interface import BASE_VERSION
from skyrl_actors.engines.logprob_check import SCORING
from skyrl_actors.engines.weight_parts import has_tower
from skyrl_actors.messages.columns import columns_from
from skyrl_actors.messages.errors import InternalError, InvalidRequest
from skyrl_actors.messages.example import TARGETS, Example
from skyrl_actors.messages.image_form import form_in
from skyrl_actors.messages.images import Picture
from skyrl_actors.messages.model import LoraSpec, ModelSpec
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.weights import WeightManifest
from skyrl_actors.transfer.folders import manifests
from tests.engines import vision_bases
from tests.engines.test_vllm_start import engine_for, environment
from tests.workers.family_runs import disturb
from tests.workers.strategy_runs import run, worker_of

__all__ = ["environment"]  # a fixture
Prompt = tuple[tuple[int, ...], tuple[Picture, ...]]


def drawn(seed: int, width: int, height: int, format: str = "PNG") -> bytes:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    content = io.BytesIO()
    Image.fromarray(values).save(content, format)
    return content.getvalue()


def prompt_of(base: Path, *parts: int | bytes) -> Prompt:
    """Return a prompt of texts, given by their lengths, and images."""
    row, random = Row("", PictureReader(form_in(base), LimitsConfig())), np.random.default_rng(1)
    for part in parts:
        if isinstance(part, int):
            row.add_text(random.integers(2, 250, part).astype(np.int32))
        else:
            row.add_image(part, "png" if part.startswith(b"\x89") else "jpeg", None)
    return row.prompt()


def scored(worker: Any, name: str, prompt: Prompt) -> np.ndarray:
    tokens = np.asarray(prompt[0], np.int32)
    ones = np.ones(len(tokens) - 1, np.float32)
    example = Example(tokens[:-1], {TARGETS: tokens[1:], "weights": ones}, prompt[1])
    (output,) = run(worker, [(name, columns_from([example]), None)], forward_only=True)
    return output.values


def trained(
    base: Path, name: str, lora: LoraSpec | None, folder: Path, train_tower: bool = False
) -> tuple[Any, Any]:
    """Return a worker with a random model, and the model's saved weights."""
    worker = worker_of(0, 1, 0, str(base), ReplicaStrategy(), budget=128)
    spec = ModelSpec(
        model_id=name, base_model="tiny", lora=lora, seed=len(name), train_tower=train_tower
    )
    worker.create_model(spec)
    disturb(worker, name)
    worker.save_checkpoint(name, str(folder), "weights", "r1")
    return worker, manifests(folder, f"{name}@1")


async def of_engine(
    engine: Any, prompt: Prompt, adapter: WeightManifest | None, version: str
) -> np.ndarray:
    found = await engine.sample("r", prompt[0], SCORING, adapter, version, prompt[1])
    assert found.prompt_logprobs is not None
    return found.prompt_logprobs[1:]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl"])
async def test_prompts_with_images_score_as_the_trainer_scores_them(kind: str, tmp_path: Path):
    """Images of several sizes, which are resized, one of them twice, and a JPEG."""
    base = vision_bases.make(kind, tmp_path / "base")
    first = drawn(0, 37, 45)
    photo = drawn(1, 61, 30, "JPEG")
    prompts = [
        prompt_of(base, 5, first, 7),
        prompt_of(base, first, 3, photo, first, 4),
        prompt_of(base, 20),
    ]
    lora, (adapter,) = trained(base, "a", LoraSpec(rank=4), tmp_path / "a")
    full, weights = trained(base, "full", None, tmp_path / "full")
    async with engine_for(base, max_images=4) as engine:
        for prompt in prompts:
            found = await of_engine(engine, prompt, adapter, adapter.version)
            np.testing.assert_allclose(found, scored(lora, "a", prompt), atol=1e-4)
        other = prompt_of(base, 5, drawn(2, 37, 45), 7)
        assert other[0] == prompts[0][0]
        found = await of_engine(engine, other, adapter, adapter.version)
        np.testing.assert_allclose(found, scored(lora, "a", other), atol=1e-4)
        assert abs(found - scored(lora, "a", prompts[0])).max() > 1e-3
        flat = full.export_weights("full", str(tmp_path / "flat"), "full@2", False)
        assert not has_tower([flat])
        await engine.load_full("full@2", (flat,))
        found = await of_engine(engine, prompts[0], None, "full@2")
        np.testing.assert_allclose(found, scored(full, "full", prompts[0]), atol=1e-4)
        await engine.load_full("full@1", weights)
        for prompt in prompts:
            found = await of_engine(engine, prompt, None, "full@1")
            np.testing.assert_allclose(found, scored(full, "full", prompt), atol=1e-4)
        # The engine keeps features of these images by the base's tower.
        tower, weights = trained(base, "tower", None, tmp_path / "tower", train_tower=True)
        await engine.load_full("tower@1", weights)
        for prompt in prompts:
            found = await of_engine(engine, prompt, None, "tower@1")
            np.testing.assert_allclose(found, scored(tower, "tower", prompt), atol=1e-4)
        # These weights come without a tower, and need the base's.
        await engine.load_full("full@2", (flat,))
        for prompt in prompts:
            found = await of_engine(engine, prompt, None, "full@2")
            np.testing.assert_allclose(found, scored(full, "full", prompt), atol=1e-4)
        await engine.sleep(2)  # drops all weights, also the tower
        for tag in ("weights", "kv_cache"):
            await engine.wake(tag)
        await engine.load_full("full@2", (flat,))
        for prompt in prompts:
            found = await of_engine(engine, prompt, None, "full@2")
            np.testing.assert_allclose(found, scored(full, "full", prompt), atol=1e-4)


@pytest.mark.slow
async def test_prompts_with_images_of_a_hybrid_in_bfloat16(tmp_path: Path):
    """vLLM's linear attention on a CPU takes bfloat16 alone.

    The trainer's scores in bfloat16 differ as much from those in float32.
    """
    base = vision_bases.make("qwen3_5", tmp_path / "base")
    prompt, other = (prompt_of(base, 5, drawn(seed, 37, 45), 7) for seed in (0, 2))
    lora, (adapter,) = trained(base, "a", LoraSpec(rank=4), tmp_path / "a")
    full, weights = trained(base, "full", None, tmp_path / "full")
    async with engine_for(base, dtype="bfloat16", max_images=4) as engine:
        found = await of_engine(engine, prompt, adapter, adapter.version)
        assert abs(found - scored(lora, "a", prompt)).mean() < 0.05
        assert abs(found - scored(lora, "a", other)).mean() > 0.2
        await engine.load_full("full@1", weights)
        found = await of_engine(engine, prompt, None, "full@1")
        assert abs(found - scored(full, "full", prompt)).mean() < 0.05
        assert abs(found - scored(lora, "a", prompt)).mean() > 0.2


@pytest.mark.slow
async def test_an_engine_samples_after_images_and_never_the_placeholder(tmp_path: Path):
    base = vision_bases.make("qwen3_vl", tmp_path / "base")
    form = form_in(base)
    assert form is not None
    tokens, pictures = prompt_of(base, 3, drawn(0, 32, 32), 3)
    async with engine_for(base, max_images=2) as engine:
        checked = (await engine.status()).check_prompt
        assert len(pictures_in(checked, form)) == 1  # so every version is compared with an image
        params = SamplingParams(
            max_tokens=40, num_samples=16, temperature=2.0, seed=1, stop=(), prompt_logprobs=True
        )
        found = await engine.sample("r", tokens, params, None, BASE_VERSION, pictures)
        assert found.prompt_logprobs is not None and len(found.prompt_logprobs) == len(tokens)
        sampled = [one.tokens for one in found.sequences]
        assert form.token not in np.concatenate(sampled)
        again = await engine.sample("s", tokens, params, None, BASE_VERSION, pictures)
        assert all((a == b.tokens).all() for a, b in zip(sampled, again.sequences, strict=True))
        scoring = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=True)
        whole = (*tokens, *sampled[0].tolist())
        scores = await engine.sample("t", whole, scoring, None, BASE_VERSION, pictures)
        assert scores.prompt_logprobs is not None
        own = scores.prompt_logprobs[len(tokens) :]
        np.testing.assert_allclose(own, found.sequences[0].logprobs, atol=1e-4)
        wrong = (replace(pictures[0], num_tokens=pictures[0].num_tokens - 1),)
        with pytest.raises((InternalError, InvalidRequest)):
            await engine.sample("u", tokens, params, None, BASE_VERSION, wrong)
        assert (await engine.sample("v", tokens, params, None, BASE_VERSION, pictures)).sequences
