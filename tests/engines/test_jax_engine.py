"""A JAX engine and a torch trainer: adapters, later weights, sleep, requests of every kind."""

import asyncio
import os
import shutil
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import pytest

from skyrl_actors import losses
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.engines import EngineConfig
from skyrl_actors.engines.interface import BASE_VERSION, EngineSpec
from skyrl_actors.engines.jax_engine import JaxEngine, places_for
from skyrl_actors.messages.columns import columns_from
from skyrl_actors.messages.errors import ConfigError, InternalError, InvalidRequest
from skyrl_actors.messages.example import TARGETS, Example
from skyrl_actors.messages.model import AdamParams, LoraSpec, ModelSpec
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.sampling import PromptTargets
from skyrl_actors.messages.weights import WeightManifest, WeightStream
from skyrl_actors.transfer.folders import full_manifests
from skyrl_actors.workers.interface import PartCall, WorkerSpec
from skyrl_actors.workers.torch_worker import TorchWorker

PROMPT = tuple(np.random.default_rng(0).integers(0, 256, 24).tolist())
SCORE = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=True)
CROSS_ENTROPY = losses.find("cross_entropy").checked({})


def spec_of(base: Path, **options: Any) -> EngineSpec:
    fields: dict[str, Any] = {
        "name": "e",
        "base_folder": str(base),
        "type": "jax",
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "kv_cache_bytes": 64 * 2**20,
        "max_loras": 2,
        "max_lora_rank": 8,
        "max_adapters": 4,
        "enforce_eager": True,
        "call_timeout_s": 120.0,
    }
    return EngineSpec(**fields | options)


@asynccontextmanager
async def engine_on(base: Path, **options: Any) -> AsyncGenerator[JaxEngine]:
    engine = JaxEngine(spec_of(base, **options))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def on_engine(base: Path, work: Callable[[JaxEngine], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with engine_on(base) as engine:
            await work(engine)

    asyncio.run(main())


class Trainer:
    """A torch rank that trains on the prompt."""

    def __init__(self, base: Path):
        self.worker = TorchWorker(
            WorkerSpec(
                role="policy",
                rank=0,
                world_size=1,
                base_folder=str(base),
                dtype="float32",
                device="cpu",
                num_threads=1,
                microbatch_tokens=512,
                collective_timeout_s=60.0,
            )
        )
        self.worker.setup("127.0.0.1", 0)
        tokens = np.asarray(PROMPT, np.int32)
        self._row = columns_from([Example(tokens[:-1], {TARGETS: tokens[1:]})])

    def _pass(self, model_id: str, forward_only: bool) -> Any:
        call = PartCall(model_id=model_id, rows=(0,), columns=self._row, loss=CROSS_ENTROPY)
        (output,) = self.worker.forward_backward((call,), forward_only)
        return output

    def trained(self, name: str, lora: LoraSpec | None, steps: int = 2) -> None:
        if name not in self.worker.models:
            self.worker.create_model(ModelSpec(model_id=name, base_model="tiny", lora=lora))
        for _ in range(steps):
            self._pass(name, False)
            self.worker.optim_step(name, AdamParams(learning_rate=0.01))

    def logprobs(self, name: str) -> np.ndarray:
        return self._pass(name, True).values

    def exported(self, name: str, folder: Path, version: str) -> WeightManifest:
        manifest = self.worker.export_weights(name, str(folder / version), version, True)
        assert manifest is not None
        return manifest


async def scores(
    engine: JaxEngine, version: str, adapter: WeightManifest | None = None
) -> np.ndarray:
    found = await engine.sample(version, PROMPT, SCORE, adapter, version)
    assert found.version == version and found.prompt_logprobs is not None
    assert np.isnan(found.prompt_logprobs[0])
    return found.prompt_logprobs[1:]


def close(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.abs(one - other).max() < 1e-4)


@pytest.mark.slow
def test_adapters_and_full_weights_arrive_exactly(random_base: Path, tmp_path: Path):
    trainer = Trainer(random_base)

    async def work(engine: JaxEngine) -> None:
        adapters: list[tuple[WeightManifest, np.ndarray]] = []
        for number in range(3):
            name = f"a{number}"
            trainer.trained(name, LoraSpec(rank=4 + 2 * number), 1 + number)
            manifest = trainer.exported(name, tmp_path, f"{name}@1")
            adapters.append((manifest, trainer.logprobs(name)))
        base = await scores(engine, BASE_VERSION)
        found = await asyncio.gather(
            *(scores(engine, manifest.version, manifest) for manifest, _ in adapters)
        )
        for one, (_, wanted) in zip(found, adapters, strict=True):
            assert close(one, wanted) and not close(one, base)
        await engine.drop_adapters(("a0@1",))
        assert set((await engine.status()).adapters) == {"a1@1", "a2@1"}
        assert close(await scores(engine, "a0@1", adapters[0][0]), adapters[0][1])
        trainer.trained("full", None)
        manifest = trainer.exported("full", tmp_path, "full@1")
        await engine.load_full("full@1", (manifest,))
        assert close(await scores(engine, "full@1"), trainer.logprobs("full"))
        with pytest.raises(InternalError, match=r"engine e holds full@1 \(asleep: False\)"):
            await scores(engine, BASE_VERSION)
        with pytest.raises(InternalError, match="cannot be read on this engine's host"):
            await engine.load_full("gone@1", (replace(manifest, path=str(tmp_path / "gone")),))
        stream = WeightStream("", 0, 2, "gloo", 200_000, 30.0)
        with pytest.raises(InternalError, match="reads weights from files"):
            await engine.load_full("full@1", (manifest,), (stream,))
        await engine.load_full(BASE_VERSION, full_manifests(random_base, BASE_VERSION))
        assert (await scores(engine, BASE_VERSION) == base).all()

    on_engine(random_base, work)


@pytest.mark.slow
def test_a_second_engine_reads_its_programs_and_draws_the_same(
    random_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found: list[tuple[int, int, Any]] = []

    async def start_and_sample() -> None:
        async with engine_on(random_base, prepare_s=300.0) as engine:
            params = SamplingParams(max_tokens=12, seed=3, num_samples=3)
            output = await engine.sample("a", PROMPT, params, None, BASE_VERSION)
            counters = engine.generator.programs.counters
            drawn = [(s.tokens.tolist(), s.logprobs.tolist()) for s in output.sequences]
            found.append((counters.programs, counters.read, drawn))

    for _ in range(2):
        asyncio.run(start_and_sample())
    (programs, read, drawn), second = found
    assert programs > 8 and read == 0
    assert second == (programs, programs, drawn)


@pytest.mark.slow
def test_a_damaged_adapter_is_refused_and_the_engine_goes_on(random_base: Path, tmp_path: Path):
    trainer = Trainer(random_base)
    trainer.trained("a", LoraSpec(rank=4))
    manifest = trainer.exported("a", tmp_path, "a@1")
    flipped = tmp_path / "flipped"
    shutil.copytree(manifest.path, flipped)
    content = bytearray((flipped / "adapter_model.safetensors").read_bytes())
    content[-1] ^= 1
    (flipped / "adapter_model.safetensors").write_bytes(content)

    async def work(engine: JaxEngine) -> None:
        bad = replace(manifest, version="flipped@1", path=str(flipped))
        with pytest.raises(InvalidRequest, match="another checksum than the trainer wrote"):
            await scores(engine, "flipped@1", bad)
        assert close(await scores(engine, "a@1", manifest), trainer.logprobs("a"))

    on_engine(random_base, work)


@pytest.mark.slow
def test_adapters_beyond_its_memory_are_read_again(random_base: Path, tmp_path: Path):
    trainer = Trainer(random_base)
    names = [f"a{number}" for number in range(6)]
    for name in names:
        trainer.trained(name, LoraSpec(rank=4), 1 + int(name[1]))
    manifests = {name: trainer.exported(name, tmp_path, f"{name}@1") for name in names}

    async def work(engine: JaxEngine) -> None:
        for name in (*names, names[0]):
            found = await scores(engine, f"{name}@1", manifests[name])
            assert close(found, trainer.logprobs(name))
        assert (await engine.status()).adapters == ("a3@1", "a4@1", "a5@1", "a0@1")

    on_engine(random_base, work)


@pytest.mark.slow
def test_an_engine_sleeps_and_wakes_and_answers_as_before(random_base: Path):
    async def work(engine: JaxEngine) -> None:
        base = await scores(engine, BASE_VERSION)
        how = SamplingParams(max_tokens=30, seed=1, stop=())
        running = asyncio.create_task(engine.sample("r", PROMPT, how, None, BASE_VERSION))
        await asyncio.sleep(0.01)
        freed = await engine.sleep(1)  # after the running sample
        assert running.done() and freed > 0 and await engine.sleep(1) == 0
        with pytest.raises(InternalError, match="asleep: True"):
            await scores(engine, BASE_VERSION)
        await engine.wake("weights")
        assert await engine.wake("kv_cache") == freed and await engine.wake("kv_cache") == 0
        assert (await scores(engine, BASE_VERSION) == base).all()
        assert await engine.release_kv(True) == freed and engine.asleep
        await engine.wake("kv_cache")
        assert await engine.sleep(2) > freed
        assert (await engine.status()).loaded_version is None
        await engine.wake("weights")
        await engine.wake("kv_cache")
        with pytest.raises(InternalError, match="holds None"):
            await scores(engine, BASE_VERSION)
        await engine.load_full(BASE_VERSION, full_manifests(random_base, BASE_VERSION))
        assert (await scores(engine, BASE_VERSION) == base).all()

    on_engine(random_base, work)


@pytest.mark.slow
def test_requests_of_every_kind_are_answered(random_base: Path):
    async def work(engine: JaxEngine) -> None:
        async def asked(**options: Any) -> Any:
            how = SamplingParams(**{"max_tokens": 8, "seed": 3, "stop": ()} | options)
            return await engine.sample("r", PROMPT, how, None, BASE_VERSION)

        several = (await asked(num_samples=3)).sequences
        for number, one in enumerate(several):
            alone = (await asked(seed=3 + number)).sequences[0]
            assert one.tokens.tolist() == alone.tokens.tolist() and one.stop_reason == "length"
        assert (await asked(seed=None)).sequences[0].tokens.tolist() != several[0].tokens.tolist()
        third = int(several[0].tokens[2])
        stopped = (await asked(stop=(third,))).sequences[0]
        assert stopped.stop_reason == "stop" and stopped.tokens[-1] == third
        assert len(stopped.tokens) == several[0].tokens.tolist().index(third) + 1
        assert engine._decode is not None
        text = engine._decode(several[0].tokens[:4].tolist())
        by_text = (await asked(stop=(text[-1],))).sequences[0]
        assert by_text.stop_reason == "stop" and len(by_text.tokens) <= 4
        shown = (await asked(temperature=0.5, top_k=4, processed_logprobs=True)).sequences[0]
        assert shown.tempered is not None and (shown.tempered > shown.logprobs).any()
        best = (await asked(temperature=0.0, topk_sample_logprobs=2)).sequences[0]
        assert best.topk_ids[:, 0].tolist() == best.tokens.tolist()
        np.testing.assert_allclose(best.topk_logprobs[:, 0], best.logprobs, atol=1e-6)
        scored = await asked(topk_prompt_logprobs=2, prompt_logprobs=True, prompt_logprobs_last_n=3)
        assert np.isnan(scored.prompt_logprobs[:-3]).all()
        np.testing.assert_allclose(
            scored.prompt_logprobs[-3:], (await scores(engine, BASE_VERSION))[-3:], atol=1e-5
        )
        assert (scored.topk_prompt_logprobs[-3:, 0] >= scored.topk_prompt_logprobs[-3:, 1]).all()
        targets = PromptTargets((len(PROMPT) - 1, 1), PROMPT[1:])
        found = await asked(prompt_targets=targets, prompt_alternatives=2)
        np.testing.assert_allclose(
            found.targets.values, await scores(engine, BASE_VERSION), atol=1e-5
        )
        assert found.alternatives.tokens.shape == (len(PROMPT) - 1, 2)

    on_engine(random_base, work)


@pytest.mark.slow
def test_limits_of_the_engine_hold(random_base: Path):
    async def work(engine: JaxEngine) -> None:
        how = SamplingParams(max_tokens=100, stop=())
        (one,) = (await engine.sample("r", PROMPT, how, None, BASE_VERSION)).sequences
        assert len(one.tokens) == 64 - len(PROMPT) and one.stop_reason == "length"
        for prompt in ((), PROMPT * 3):
            with pytest.raises(InvalidRequest, match="leave room for an answer"):
                await engine.sample("r", prompt, how, None, BASE_VERSION)
        with pytest.raises(
            InvalidRequest, match="the prompt has the token id 9999999; the model's"
        ):
            await engine.sample("r", (1, 9999999), how, None, BASE_VERSION)
        decode, engine._decode = engine._decode, None
        with pytest.raises(InvalidRequest, match=r"stop texts need a tokenizer\.json"):
            text = replace(how, stop=("x",))
            await engine.sample("r", PROMPT, text, None, BASE_VERSION)
        engine._decode = decode
        calls = [
            asyncio.create_task(engine.sample(str(i), PROMPT, how, None, BASE_VERSION))
            for i in range(12)
        ]
        await asyncio.sleep(0.05)
        calls[0].cancel()
        calls[11].cancel()
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(one, asyncio.CancelledError) for one in done].count(True) == 2
        assert (await engine.status()).running == 0

    on_engine(random_base, work)


def test_a_cache_without_room_for_a_sequence_is_refused(random_base: Path):
    from skyrl_actors.jax_workers.architecture import architecture_of

    spec, arch = spec_of(random_base, kv_cache_bytes=2**16), architecture_of(str(random_base))
    with pytest.raises(ConfigError, match=r"engine\.kv_cache_bytes is 65536, and one sequence"):
        places_for(spec, arch)
    assert places_for(spec_of(random_base, max_num_seqs=3), arch) == 3


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"external": [{"url": "http://host:8000"}]}, "external"),
        ({"tensor_parallel": 2}, "tensor_parallel"),
        ({"tool_parser": "hermes"}, "tool_parser"),
        ({"enforce_eager": False}, "enforce_eager"),
        ({"vllm": {"kv_cache_dtype": "fp8"}}, "vllm"),
        ({"in_flight": "keep"}, "in_flight keep"),
    ],
)
def test_keys_that_a_jax_engine_does_not_honour_are_refused(options: dict, named: str):
    with pytest.raises(
        ValueError, match=rf"engine\.{named} is not available with engine\.type jax"
    ):
        EngineConfig.model_validate({"type": "jax", **options})


def test_a_vllm_engine_does_not_compile_ahead():
    with pytest.raises(ValueError, match=r"engine\.prepare_s is of engine\.type jax"):
        EngineConfig(prepare_s=10)
    assert EngineConfig().seconds_to_prepare == 0
    assert EngineConfig(type="jax").seconds_to_prepare == 120
    assert EngineConfig(type="jax", prepare_s=0).seconds_to_prepare == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transfer": {"type": "gloo"}}, "streams weights, and engines of type jax read files"),
        ({"router_replay": True}, "engines of type jax do not return routes"),
        ({"placement": {"device": "gpu"}}, "engines of type jax keep their GPU memory"),
    ],
)
def test_what_a_jax_engine_cannot_do_is_refused(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        ClusterConfig.model_validate({"engine": {"type": "jax"}, **options})
