"""Two ranks, two engines, real Ray: all transports move the same weights; versions never change."""

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from skyrl_actors import losses
from skyrl_actors.backends.ray_backend import RayBackend
from skyrl_actors.colocation.phases import Phase
from skyrl_actors.config.base_models import PretrainedBase
from skyrl_actors.config.cluster import ClusterConfig, EngineConfig, LoraConfig
from skyrl_actors.config.groups import GroupConfig
from skyrl_actors.config.observe import ObserveConfig
from skyrl_actors.config.transfers import (
    DiskTransferConfig,
    FileTransferConfig,
    LogprobCheckConfig,
    StreamTransferConfig,
)
from skyrl_actors.journal.encoding import decode, encode
from skyrl_actors.messages.columns import Columns, columns_from
from skyrl_actors.messages.errors import InternalError
from skyrl_actors.messages.example import TARGETS, Example
from skyrl_actors.messages.model import AdamParams, LoraSpec, ModelSpec
from skyrl_actors.messages.precondition import OpPrecondition
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.weights import SamplerWeights
from skyrl_actors.transfer.build import build_transfer
from tests.collector import collector, of_request

CALL = losses.find("cross_entropy").checked({})
TOKENS = np.random.default_rng(0).integers(0, 256, 24).astype(np.int32)
ROWS = columns_from(
    [Example(TOKENS[:-1], {TARGETS: TOKENS[1:]}), Example(TOKENS[5:-1], {TARGETS: TOKENS[6:]})]
)


class Tenant:
    """One model and its operation count."""

    def __init__(self, backend: RayBackend, spec: ModelSpec):
        self.backend, self.spec, self.number = backend, spec, 1

    def change(self) -> OpPrecondition:
        self.number += 1
        return OpPrecondition(self.number, self.number - 1, f"{self.spec.model_id}-{self.number}")

    @property
    def here(self) -> OpPrecondition:
        return OpPrecondition(None, self.number)

    async def create(self) -> None:
        await self.backend.create_model(self.spec, OpPrecondition(1))

    async def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            await self.backend.forward_backward(self.spec, self.change(), ROWS, CALL, False)
            await self.backend.optim_step(self.spec, self.change(), AdamParams(learning_rate=0.005))

    async def logprobs(self, rows: Columns = ROWS) -> np.ndarray:
        output = await self.backend.forward_backward(self.spec, self.here, rows, CALL, True)
        return output.fields["logprobs"][: len(TOKENS) - 1]

    async def freeze(self, version: str) -> SamplerWeights:
        return await self.backend.save_for_sampler(self.spec, self.here, version)


async def compared_as_named_checkpoints(backend: RayBackend, tenant: Tenant, folder: Path) -> None:
    """Check that the trainer's scores are stored with named weights, for later controllers."""
    saved = str(folder / f"named-{tenant.spec.model_id}")
    await backend.save_checkpoint(tenant.spec, tenant.here, saved, "weights", "r")
    weights = await backend.open_sampler("", saved, f"named {tenant.spec.model_id}")
    assert (
        weights.scored == (await tenant.freeze(f"{tenant.spec.model_id}@named")).scored
        and len(set(weights.scored)) > 20
    )
    assert decode(encode(weights)) == weights
    done = list(backend.parts.engines.logprob_check.differences)
    np.testing.assert_allclose(
        await sampled(backend, weights, 300), await tenant.logprobs(), atol=1e-4
    )
    # No difference was dropped meanwhile.
    assert list(backend.parts.engines.logprob_check.differences)[: len(done)] == done
    assert len(backend.parts.engines.logprob_check.differences) > len(done)


async def sampled(
    backend: RayBackend, weights: SamplerWeights, number: int, times: int = 6
) -> np.ndarray:
    """Return logprobs of TOKENS; there are enough samples for both engines."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=True)
    prompt = tuple(TOKENS.tolist())
    asked = [
        asyncio.ensure_future(backend.sample(f"r{number}-{i}", prompt, params, weights))
        for i in range(times)
    ]
    await asyncio.wait(asked)  # all ended, also if one of them failed
    outputs = [each.result() for each in asked]
    assert {output.version for output in outputs} == {weights.version}
    found = [output.prompt_logprobs[1:] for output in outputs if output.prompt_logprobs is not None]
    assert (
        len(found) == times and max(float(np.abs(found[0] - other).max()) for other in found) < 1e-4
    )
    return found[0]


@pytest.fixture(scope="module")
def local_ray():
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
    )
    yield
    ray.shutdown()


def config_for(base: Path, folder: Path, otlp: str) -> ClusterConfig:
    return ClusterConfig(
        name="transports",
        base_model=PretrainedBase(name="tiny", path=base),
        policy=GroupConfig(num_ranks=2, microbatch_tokens=64),
        critic=None,
        engine=EngineConfig(
            num_engines=2, kv_cache_bytes=32 * 2**20, max_num_seqs=16, in_flight="keep", slice_s=0.2
        ),
        lora=LoraConfig(max_rank=8),
        transfer=FileTransferConfig(folder=folder, checksums=True),
        logprob_check=LogprobCheckConfig(action="refuse"),
        observe=ObserveConfig(otlp=otlp),
    )


async def while_training_wants_the_devices(
    backend: RayBackend, tenant: Tenant, weights: SamplerWeights, number: int
) -> None:
    """Check that training takes the devices meanwhile and leaves long samples unchanged."""
    params = SamplingParams(max_tokens=300, seed=3, stop=())
    prompt = tuple(TOKENS[:8].tolist())

    async def drawn(name: str) -> list[np.ndarray]:
        outputs = await asyncio.gather(
            *(backend.sample(f"{name}-{number}-{i}", prompt, params, weights) for i in range(4))
        )
        assert {len(output.sequences[0].tokens) for output in outputs} == {300}
        return [
            value
            for output in outputs
            for value in (output.sequences[0].tokens, output.sequences[0].logprobs)
        ]

    undisturbed = await drawn("alone")
    sampling = asyncio.create_task(drawn("disturbed"))
    # Another process runs the samples, so this polls.
    while not any(status.running for status in await backend.parts.engines.status()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await tenant.backend.forward_backward(tenant.spec, tenant.change(), ROWS, CALL, False)
    assert not sampling.done()
    await tenant.backend.optim_step(tenant.spec, tenant.change(), AdamParams(learning_rate=0.01))
    for here, there in zip(undisturbed, await sampling, strict=True):
        np.testing.assert_allclose(here, there, atol=1e-4)


async def reported(heard: list[Any], request_id: str, wanted: set[str]) -> None:
    """Wait for the spans, which processes send every few seconds."""
    async with asyncio.timeout(30):
        # Other processes send, so this polls.
        while {span.name for span in of_request(heard, request_id)} != wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@pytest.mark.slow
async def test_every_transport_brings_the_same_weights(
    local_ray, random_base: Path, tmp_path: Path
):
    with collector() as (url, heard):
        await _moves_weights(
            random_base, config_for(random_base, tmp_path / "exports", url), tmp_path
        )
        ranks = {"policy[0]", "policy[1]"}
        await reported(heard, "lora-2", {f"{rank} forward_backward" for rank in ranks})
        await reported(heard, "full-3", {f"{rank} optim_step" for rank in ranks})
        samples = [span for i in range(6) for span in of_request(heard, f"r0-{i}")]
        assert {span.name for span in samples} == {"engine[0] sample", "engine[1] sample"}
        assert {
            a.value.string_value for span in samples for a in span.attributes if a.key == "version"
        } == {"full@0", "lora@0"}


async def _moves_weights(random_base: Path, config: ClusterConfig, tmp_path: Path) -> None:
    said: list[str] = []
    backend = RayBackend(config, random_base, said.append, detached=False)
    await backend.start(1)
    try:
        full, lora = (
            Tenant(backend, ModelSpec(model_id="full", base_model="tiny")),
            Tenant(backend, ModelSpec(model_id="lora", base_model="tiny", lora=LoraSpec(rank=8))),
        )
        await full.create()
        await lora.create()
        pinned: list[tuple[SamplerWeights, np.ndarray]] = []
        transports = [
            config.transfer,
            DiskTransferConfig(folder=tmp_path / "exports"),
            FileTransferConfig(type="lora", folder=tmp_path / "exports"),
            FileTransferConfig(type="object_store", folder=tmp_path / "exports"),
            StreamTransferConfig(type="gloo", folder=tmp_path / "exports", bucket_bytes=100_000),
        ]
        for number, transport in enumerate(transports):
            backend.parts.delivery.transfer = build_transfer(
                config.model_copy(update={"transfer": transport})
            )
            for tenant in (lora,) if transport.type == "lora" else (full, lora):
                await tenant.train(2)
                wanted = await tenant.logprobs()
                weights = await tenant.freeze(f"{tenant.spec.model_id}@{number}")
                found = await sampled(backend, weights, number)
                np.testing.assert_allclose(
                    found, wanted, atol=1e-4, err_msg=f"{transport.type} {tenant.spec.model_id}"
                )
                pinned.append((weights, wanted))
        await full.train(5)
        # The first versions, published at least five steps ago.
        for number, (weights, wanted) in enumerate(pinned[:2]):
            np.testing.assert_allclose(
                await sampled(backend, weights, 100 + number, 2), wanted, atol=1e-4
            )
        assert float(np.abs(pinned[0][1] - await full.logprobs()).max()) > 0.1
        # From each phase to each other one, on real engines.
        for phase in (*itertools.chain.from_iterable(itertools.combinations(Phase, 2)), Phase.IDLE):
            async with backend.parts.phase_lock.hold(phase):
                pass
        np.testing.assert_allclose(
            await sampled(backend, *pinned[0][:1], 150, 2), pinned[0][1], atol=1e-4
        )
        base = SamplerWeights(version="base")
        for number, weights in enumerate(
            (
                base,
                pinned[-1][0],  # an adapter
                pinned[0][0],  # full weights
            )
        ):
            await while_training_wants_the_devices(backend, lora, weights, number)
        backend.config = config.model_copy(
            update={"engine": config.engine.model_copy(update={"in_flight": "abort"})}
        )
        await while_training_wants_the_devices(backend, lora, base, 3)
        status = await backend.status()
        freed = [
            size
            for entered in status["phase_timeline"]
            for name, _, size in entered["moves"]
            if name == "free KV cache"
        ]
        assert (
            len(status["phase_timeline"]) >= 50
            and status["phase_seconds"]["SAMPLE"] > 0
            and max(freed) > 0
        )
        to_train = [entered for entered in status["phase_timeline"] if entered["phase"] == "TRAIN"]
        assert (
            max(
                size
                for entered in to_train
                for name, _, size in entered["moves"]
                if name == "free KV cache"
            )
            > 0
        )
        differences = status["logprob_differences"]
        assert len(differences) >= 2 * len(transports) and 0 < max(differences) < 1e-4
        for tenant in (full, lora):
            await compared_as_named_checkpoints(backend, tenant, tmp_path)
        wrong = await full.freeze("full@wrong")
        logprob_check, shifted = (
            backend.parts.engines.logprob_check,
            tuple(value + 0.01 for value in wrong.scored),
        )
        wrong = replace(wrong, scored=shifted)
        with pytest.raises(
            InternalError, match=r"and the trainer differ by 0\.01 nats a token on full@wrong"
        ):
            await sampled(backend, wrong, 200)
        assert logprob_check.exceeded
        assert [engine["state"] for engine in status["engines"]] == ["HEALTHY", "HEALTHY"]
    finally:
        await backend.close()
    assert not [text for text in said if "again" in text or "lost" in text]
