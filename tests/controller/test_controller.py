"""The controller with a fake backend: order, idempotency, failures, sessions, long polls."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy.exc import TimeoutError as PoolTimeout

from skyrl_actors.api import translate, wire
from skyrl_actors.backends.backend import ServedModels
from skyrl_actors.config.base_models import TinyBase
from skyrl_actors.config.cluster import ClusterConfig, JournalConfig, LimitsConfig
from skyrl_actors.controller import samples
from skyrl_actors.controller.controller import Controller
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.columns import columns_from
from skyrl_actors.messages.errors import (
    CapacityError,
    ConfigError,
    Conflict,
    InvalidRequest,
    NotFound,
    PartDown,
)
from skyrl_actors.messages.example import Example
from skyrl_actors.messages.model import AdamParams, LoraSpec, LossCall, ModelSpec
from tests.fakes import FakeBackend, changed


@pytest.fixture
async def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(samples, "LORA_SAMPLER_VERSIONS", 2)
    config = ClusterConfig(
        base_model=TinyBase(name="tiny"),
        limits=LimitsConfig(open_requests=50),
        checkpoint_dir=tmp_path / "checkpoints",
    )
    made = Controller(
        config, FakeBackend(), SqlJournal(JournalConfig(folder=tmp_path / "journal"), KINDS)
    )
    await made.start()
    yield made
    await made.close()


async def model_in(controller: Controller, number: int = 0, **fields) -> tuple[str, str]:
    session = await controller.create_session()
    spec = ModelSpec(
        model_id=f"{session}:train:{number}", base_model="tiny", lora=LoraSpec(rank=4), **fields
    )
    await done(controller, await controller.submit(rq.CreateModel(spec=spec, session_id=session)))
    return session, spec.model_id


async def done(controller: Controller, request_id: str) -> rs.Result:
    result = await controller.answers.whole(request_id, 5)
    assert result is not None
    return result


def rows(first_token: int = 5, length: int = 3, count: int = 1, **fields):
    tokens = np.full(length, first_token, np.int32)
    return columns_from([Example(tokens, {"target_tokens": tokens, **fields})] * count)


def batch(model_id: str, seq_id: int | None = None, first_token: int = 5) -> rq.ForwardBackward:
    return rq.ForwardBackward(
        model_id=model_id,
        columns=rows(first_token),
        loss=LossCall("cross_entropy", {}),
        seq_id=seq_id,
    )


async def test_requests_of_a_model_run_in_order(controller: Controller):
    _, model_id = await model_in(controller)
    backend: FakeBackend = controller.backend  # type: ignore[assignment]
    backend.go.clear()
    ids = []
    for i in range(5):
        ids.append(await controller.submit(batch(model_id, 2 * i + 1, first_token=i)))
        ids.append(await controller.submit(rq.OptimStep(model_id, AdamParams(), 2 * i + 2)))
    backend.go.set()
    await asyncio.gather(*(done(controller, i) for i in ids))
    expected = [
        call
        for i in range(5)
        for call in ((f"forward_backward {i}", model_id), ("optim_step", model_id))
    ]
    assert backend.calls[1:] == expected


async def test_a_retry_is_the_same_request(controller: Controller):
    _, model_id = await model_in(controller)
    backend: FakeBackend = controller.backend  # type: ignore[assignment]
    first = await controller.submit(rq.OptimStep(model_id, AdamParams(), 1))
    assert await controller.submit(rq.OptimStep(model_id, AdamParams(), 1)) == first
    await done(controller, first)
    assert await controller.submit(rq.OptimStep(model_id, AdamParams(), 1)) == first
    assert backend.calls.count(("optim_step", model_id)) == 1
    with pytest.raises(Conflict):
        await controller.submit(rq.OptimStep(model_id, AdamParams(learning_rate=1), 1))
    with pytest.raises(Conflict):
        await controller.submit(batch(model_id, 1))


async def test_creating_the_same_model_again_is_a_retry(controller: Controller):
    session = await controller.create_session()
    request = rq.CreateModel(
        spec=ModelSpec(
            model_id=f"{session}:train:0", base_model="tiny", lora=LoraSpec(rank=4), seed=3
        ),
        session_id=session,
    )
    first = await controller.submit(request)
    assert await controller.submit(request) == first
    assert await done(controller, first) == rs.ModelCreated(request.model_id)
    assert len(controller.tenants.models) == 1


async def test_many_callers_can_wait_for_an_answer_and_read_it_again(controller: Controller):
    _, model_id = await model_in(controller)
    backend: FakeBackend = controller.backend  # type: ignore[assignment]
    backend.go.clear()
    request_id = await controller.submit(rq.OptimStep(model_id, AdamParams()))
    assert await controller.answers.whole(request_id, 0.01) is None
    waiting = [asyncio.create_task(controller.answers.whole(request_id, 5)) for _ in range(3)]
    await asyncio.sleep(0)
    backend.go.set()
    assert [await w for w in waiting] == [rs.StepDone({})] * 3
    assert await controller.answers.whole(request_id, 0) == rs.StepDone({})
    with pytest.raises(NotFound, match="not known"):
        await controller.answers.whole("r-none", 0)


async def test_a_failure_is_an_answer_and_the_model_continues(controller: Controller):
    _, model_id = await model_in(controller)
    backend: FakeBackend = controller.backend  # type: ignore[assignment]
    backend.failing.add("optim_step")
    result = await done(controller, await controller.submit(rq.OptimStep(model_id, AdamParams())))
    assert (
        isinstance(result, rs.Failure)
        and result.category == "server"
        and "optim_step broke" in result.message
    )
    backend.failing.clear()
    assert await done(
        controller, await controller.submit(rq.OptimStep(model_id, AdamParams()))
    ) == rs.StepDone({})


async def test_a_failed_create_leaves_no_model(controller: Controller):
    backend: FakeBackend = controller.backend  # type: ignore[assignment]
    backend.failing.add("create_model")
    session = await controller.create_session()
    spec = ModelSpec(model_id=f"{session}:train:0", base_model="tiny", lora=LoraSpec(rank=4))
    assert isinstance(
        await done(
            controller, await controller.submit(rq.CreateModel(spec=spec, session_id=session))
        ),
        rs.Failure,
    )
    assert not controller.tenants.models


async def test_a_load_into_a_model_whose_creation_failed_says_so(controller: Controller):
    backend: FakeBackend = controller.backend  # type: ignore[assignment]
    _, model_id = await model_in(controller)
    save = rq.SaveWeights(model_id=model_id, name="a", seq_id=1)
    saved = await done(controller, await controller.submit(save))
    assert isinstance(saved, rs.Saved)
    session = await controller.create_session()
    spec = ModelSpec(model_id=f"{session}:train:0", base_model="tiny", lora=LoraSpec(rank=4))
    backend.failing.add("create_model")
    backend.go.clear()
    create = await controller.submit(rq.CreateModel(spec=spec, session_id=session))
    load = await controller.submit(
        rq.LoadWeights(model_id=spec.model_id, path=saved.path, with_optimizer=False, seq_id=1)
    )
    backend.go.set()
    assert isinstance(await done(controller, create), rs.Failure)
    failed = await done(controller, load)
    assert isinstance(failed, rs.Failure) and failed.category == "user"
    assert spec.model_id in failed.message and "KeyError" not in failed.message


async def test_finishing_a_session_frees_its_models_and_samplers(controller: Controller):
    session, model_id = await model_in(controller)
    _, other = await model_in(controller)
    sampler = f"{session}:sample:0"
    await done(
        controller,
        await controller.submit(rq.SaveForSampler(model_id=model_id, sampler_id=sampler)),
    )
    await controller.finish_session(session)
    await controller.finish_session(session)
    assert list(controller.tenants.models) == [other]
    backend: FakeBackend = controller.backend  # type: ignore[assignment]
    assert ("delete_model", model_id) in backend.calls
    assert ("drop_sampler", f"{model_id}@1") in backend.calls
    with pytest.raises(NotFound, match="unknown model"):
        await controller.submit(batch(model_id))
    with pytest.raises(NotFound):
        await controller.heartbeat(session)


async def test_only_the_newest_sampler_versions_are_kept(controller: Controller):
    session, model_id = await model_in(controller)
    for i in range(3):
        await done(
            controller,
            await controller.submit(
                rq.SaveForSampler(model_id=model_id, sampler_id=f"{session}:sample:{i}")
            ),
        )
    sample = rq.Sample(
        sampler_id=f"{session}:sample:2", prompt=(1, 2), params=rq.SamplingParams(max_tokens=4)
    )
    result = await done(controller, await controller.submit(sample))
    assert isinstance(result, rs.SampleOutput) and result.version == f"{model_id}@3"
    with pytest.raises(NotFound, match="was dropped: only the newest unnamed versions"):
        await controller.submit(
            rq.Sample(
                sampler_id=f"{session}:sample:0",
                prompt=(1, 2),
                params=rq.SamplingParams(max_tokens=4),
            )
        )


async def test_a_sample_retry_is_the_same_request(controller: Controller):
    session, _ = await model_in(controller)
    await controller.open_sampler(f"{session}:sample:0", session, "tiny", None)
    sample = rq.Sample(
        sampler_id=f"{session}:sample:0",
        prompt=(1, 2),
        params=rq.SamplingParams(max_tokens=4),
        seq_id=7,
    )
    first = await controller.submit(sample)
    assert await controller.submit(sample) == first
    await done(controller, first)
    assert controller.backend.calls.count(("sample", "base")) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (rq.SamplingParams(max_tokens=600), r"prompt of 2 \+ max_tokens 600"),
        (rq.SamplingParams(max_tokens=0), "max_tokens at least 1"),
        (rq.SamplingParams(max_tokens=4, num_samples=0), "num_samples 0"),
        (rq.SamplingParams(max_tokens=4, temperature=-1), "temperature -1"),
        (rq.SamplingParams(max_tokens=4, top_p=0), "top_p 0"),
        (rq.SamplingParams(max_tokens=4, seed=-1), r"seed -1: use 0 to 2\^63"),
        (
            rq.SamplingParams(max_tokens=4, num_samples=2, seed=2**63 - 1),
            r"seed 9223372036854775807: use 0 to 2\^63 - num_samples",
        ),
        (rq.SamplingParams(max_tokens=4, top_k=0), "top_k 0"),
        (rq.SamplingParams(max_tokens=4, topk_prompt_logprobs=21), "topk_prompt_logprobs 21"),
        (rq.SamplingParams(max_tokens=4, stop=("",)), "at most 64 texts of 1 to 1000 characters"),
        (rq.SamplingParams(max_tokens=4, stop=("x" * 1001,)), "at most 64 texts"),
        (rq.SamplingParams(max_tokens=4, stop=("x",) * 65), "at most 64 texts"),
        (rq.SamplingParams(max_tokens=4, stop=(True,)), "stop token True"),
        (rq.SamplingParams(max_tokens=4, stop=(7,) * 321), "stop has 321 tokens"),
    ],
)
async def test_bad_sampling_parameters_are_refused(
    controller: Controller, params: rq.SamplingParams, message: str
):
    session = await controller.create_session()
    await controller.open_sampler(f"{session}:sample:0", session, "tiny", None)
    with pytest.raises(InvalidRequest, match=message):
        await controller.submit(
            rq.Sample(sampler_id=f"{session}:sample:0", prompt=(1, 2), params=params)
        )


async def test_bad_batches_are_refused_at_once(controller: Controller):
    _, model_id = await model_in(controller)
    ce = LossCall("cross_entropy", {})
    for columns, loss, message in (
        (rows(length=600), ce, "datum 0 has 600 tokens; tiny takes 512"),
        (rows(first_token=320), ce, "token id outside 0 to 319"),
        (rows(first_token=-1), ce, "token id outside 0 to 319"),
        (rows(count=1025), ce, "1025 datums in one request; at most 1024"),
        (
            rows(weights=np.full(3, np.nan, np.float32)),
            ce,
            "weights has a value that is not finite",
        ),
        (rows(), LossCall("nope", {}), "unknown loss 'nope'"),
        (rows(), LossCall("cross_entropy", {"x": 1}), "has no option 'x'"),
        (rows(), LossCall("ppo", {}), "missing: logprobs, advantages"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            await controller.submit(
                rq.ForwardBackward(model_id=model_id, columns=columns, loss=loss)
            )
    with pytest.raises(InvalidRequest, match=r"beta1 is 1.0"):
        await controller.submit(rq.OptimStep(model_id, AdamParams(beta1=1.0)))
    assert controller.queue.num_open == 0


async def test_bad_models_are_refused_at_once(controller: Controller):
    session = await controller.create_session()
    for spec, message in (
        (
            ModelSpec(model_id=f"{session}:train:0", base_model="other", lora=LoraSpec(rank=4)),
            "unknown base model 'other'; this service has 'tiny'",
        ),
        (
            ModelSpec(model_id=f"{session}:train:0", base_model="tiny", lora=LoraSpec(rank=64)),
            "lora rank 64: this service takes 1 to 32",
        ),
        (
            ModelSpec(
                model_id=f"{session}:train:0",
                base_model="tiny",
                role="judge",
                lora=LoraSpec(rank=4),
            ),  # type: ignore[arg-type]
            "model_role 'judge': use one of policy, critic",
        ),
    ):
        with pytest.raises(InvalidRequest, match=message):
            await controller.submit(rq.CreateModel(spec=spec, session_id=session))
    with pytest.raises(NotFound, match="unknown session"):
        await controller.submit(
            rq.CreateModel(
                spec=ModelSpec(model_id="x:train:0", base_model="tiny", lora=LoraSpec(rank=4)),
                session_id="x",
            )
        )


async def test_a_critic_is_not_sampled(controller: Controller):
    session, critic = await model_in(controller, role="critic")
    with pytest.raises(InvalidRequest, match="is a critic: it has values, not tokens"):
        await controller.submit(
            rq.SaveForSampler(model_id=critic, sampler_id=f"{session}:sample:0")
        )


async def test_ppo_means_ppo_critic_on_a_critic(controller: Controller):
    _, critic = await model_in(controller, role="critic")
    values = np.zeros(3, np.float32)
    request = rq.ForwardBackward(
        model_id=critic,
        columns=rows(values=values, returns=values),
        loss=LossCall("ppo", {"value_clip": 0.3}),
    )
    assert isinstance(await done(controller, await controller.submit(request)), rs.LossOutput)


async def test_open_requests_are_bounded(controller: Controller):
    _, model_id = await model_in(controller)
    backend: FakeBackend = controller.backend  # type: ignore[assignment]
    backend.go.clear()
    ids = [await controller.submit(rq.OptimStep(model_id, AdamParams())) for _ in range(50)]
    with pytest.raises(CapacityError, match="50 requests are open"):
        await controller.submit(rq.OptimStep(model_id, AdamParams()))
    backend.go.set()
    await asyncio.gather(*(done(controller, i) for i in ids))


async def test_unknown_checkpoints_are_refused(controller: Controller):
    session, model_id = await model_in(controller)
    with pytest.raises(NotFound, match="no checkpoint tinker://a/weights/b"):
        await controller.submit(
            rq.CreateModel(
                spec=ModelSpec(model_id=f"{session}:train:1", base_model=""),
                session_id=session,
                from_path="tinker://a/weights/b",
            )
        )
    with pytest.raises(InvalidRequest, match="not a tinker path"):
        await controller.submit(
            rq.LoadWeights(model_id=model_id, path="tinker://a/../b", with_optimizer=True)
        )
    result = await done(
        controller,
        await controller.submit(
            rq.LoadWeights(model_id=model_id, path="tinker://a/weights/b", with_optimizer=True)
        ),
    )
    assert (
        isinstance(result, rs.Failure)
        and result.category == "user"
        and "no checkpoint" in result.message
    )


async def test_a_step_after_a_failed_batch_is_not_applied(controller: Controller):
    _, model_id = await model_in(controller)
    backend: FakeBackend = controller.backend  # type: ignore[assignment]
    backend.failing.add("forward_backward")
    batch_id, step_id = (
        await controller.submit(batch(model_id)),
        await controller.submit(rq.OptimStep(model_id, AdamParams())),
    )
    assert isinstance(await done(controller, batch_id), rs.Failure)
    failed = await done(controller, step_id)
    assert (
        isinstance(failed, rs.Failure)
        and "not applied" in failed.message
        and failed.category == "server"
    )
    assert (
        backend.calls[-1] == ("drop_gradients", model_id)
        and ("optim_step", model_id) not in backend.calls
    )
    assert await done(
        controller, await controller.submit(rq.OptimStep(model_id, AdamParams()))
    ) == rs.StepDone({})


async def test_weights_stay_until_the_last_accepted_sample_is_answered(controller: Controller):
    session, model_id = await model_in(controller)
    backend: FakeBackend = controller.backend  # type: ignore[assignment]
    await done(
        controller,
        await controller.submit(
            rq.SaveForSampler(model_id=model_id, sampler_id=f"{session}:sample:0")
        ),
    )
    backend.go.clear()
    sample_id = await controller.submit(
        rq.Sample(
            sampler_id=f"{session}:sample:0", prompt=(1, 2), params=rq.SamplingParams(max_tokens=4)
        )
    )
    finishing = asyncio.create_task(controller.finish_session(session))
    await asyncio.sleep(0.01)
    assert ("drop_sampler", f"{model_id}@1") not in backend.calls
    backend.go.set()
    await finishing
    assert isinstance(await done(controller, sample_id), rs.SampleOutput)
    async with asyncio.timeout(5):
        while ("drop_sampler", f"{model_id}@1") not in backend.calls:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert backend.calls.index(("sample", f"{model_id}@1")) < backend.calls.index(
        ("drop_sampler", f"{model_id}@1")
    )


async def test_finishing_a_session_frees_a_sampler_that_is_being_saved(controller: Controller):
    session, model_id = await model_in(controller)
    backend: FakeBackend = controller.backend  # type: ignore[assignment]
    backend.go.clear()
    saving = await controller.submit(
        rq.SaveForSampler(model_id=model_id, sampler_id=f"{session}:sample:0")
    )
    queued = await controller.submit(rq.OptimStep(model_id, AdamParams()))
    finishing = asyncio.create_task(controller.finish_session(session))
    await asyncio.sleep(0)
    backend.go.set()
    await finishing
    assert isinstance(await done(controller, saving), rs.SamplerSaved)
    failed = await done(controller, queued)
    assert isinstance(failed, rs.Failure) and "was finished before this ran" in failed.message
    assert (
        ("drop_sampler", f"{model_id}@1") in backend.calls
        and not controller.tenants.samplers
        and not backend.models
    )


async def test_a_new_model_is_deleted_when_its_checkpoint_does_not_load(controller: Controller):
    session, model_id = await model_in(controller)
    saved = await done(
        controller, await controller.submit(rq.SaveWeights(model_id=model_id, name="c"))
    )
    assert isinstance(saved, rs.Saved)
    backend: FakeBackend = controller.backend  # type: ignore[assignment]
    backend.failing.add("load_checkpoint")
    request = rq.CreateModel(
        spec=ModelSpec(model_id=f"{session}:train:1", base_model=""),
        session_id=session,
        from_path=saved.path,
    )
    assert isinstance(await done(controller, await controller.submit(request)), rs.Failure)
    assert list(backend.models) == [model_id] == list(controller.tenants.models)


async def test_a_model_is_created_without_an_output_layer_that_engines_cannot_sample(
    controller: Controller,
):
    controller.readiness.capabilities = changed(controller.readiness.able, adapts_head=False)
    session = await controller.create_session()
    body = {"session_id": session, "base_model": "tiny", "lora_config": {"rank": 4}}
    request = translate.create_model(
        wire.CreateModel.model_validate({**body, "model_seq_id": 0}), 32.0
    )
    first = await controller.submit(request)
    assert controller.tenants.models[request.model_id].spec.lora == LoraSpec(
        rank=4, train_unembed=False
    )
    assert await controller.submit(request) == first  # a retry
    named = {**body, "model_seq_id": 1, "lora_config": {"rank": 4, "train_unembed": True}}
    with pytest.raises(
        InvalidRequest, match="set train_unembed=False, train_attn and train_mlp are allowed"
    ):
        await controller.submit(
            translate.create_model(wire.CreateModel.model_validate(named), 32.0)
        )


async def test_a_repeated_create_without_a_seed_is_a_retry(controller: Controller):
    session = await controller.create_session()
    body = wire.CreateModel(session_id=session, model_seq_id=0, base_model="tiny")
    first, second = translate.create_model(body, 32.0), translate.create_model(body, 32.0)
    assert first == second and await controller.submit(first) == await controller.submit(second)
    other = wire.CreateModel(session_id=session, model_seq_id=1, base_model="tiny")
    assert translate.create_model(other, 32.0).spec.seed != first.spec.seed


async def test_an_operation_waits_for_a_full_disk_and_is_executed_once(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
):
    """The disk of the checkpoint folder is full at first. The operation does not fail."""
    monkeypatch.setattr("skyrl_actors.controller.lanes.LONGEST_PAUSE_S", 0.01)
    folders, failures = controller.folders, {"note_run": 2, "note": 2}

    def full_at_first(name: str):
        note = getattr(folders, name)

        def noted(*arguments):
            if failures[name]:
                failures[name] -= 1
                raise OSError(28, "No space left on device")
            note(*arguments)

        return noted

    for name in failures:
        monkeypatch.setattr(folders, name, full_at_first(name))
    _, model_id = await model_in(controller)
    saved = await done(
        controller,
        await controller.submit(
            rq.SaveWeights(model_id=model_id, name="c", user_metadata={"a": "b"})
        ),
    )
    assert isinstance(saved, rs.Saved) and failures == {"note_run": 0, "note": 0}
    (entry,) = (await controller.catalog("run", model_id)).checkpoints
    assert entry.path == saved.path and entry.user_metadata == {"a": "b"}
    backend: FakeBackend = controller.backend  # type: ignore[assignment]
    assert [verb for verb, _ in backend.calls].count("save_checkpoint") == 1


async def test_requests_whose_payloads_left_memory_run(
    controller: Controller,
):
    _, model_id = await model_in(controller)
    backend: FakeBackend = controller.backend  # type: ignore[assignment]
    backend.go.clear()
    memory = controller._ledger.memory
    memory.limit = 3 * 2**20
    wide = columns_from(
        [Example(np.full(2**17, 7, np.int32), {"target_tokens": np.full(2**17, 7, np.int32)})]
    )
    controller.config = controller.config.model_copy(update={"limits": LimitsConfig(tokens=2**20)})
    controller.readiness.capabilities = changed(controller.readiness.able, max_context_tokens=2**20)
    ids = [
        await controller.submit(
            rq.ForwardBackward(
                model_id=model_id, columns=wide, loss=LossCall("cross_entropy", {}), seq_id=i
            )
        )
        for i in range(1, 9)
    ]
    ops = [controller._ledger.ops[request_id] for request_id in ids]
    assert sum(op.request is None for op in ops) >= 5 and memory.num_bytes <= memory.limit
    backend.go.set()
    results = await asyncio.gather(*(done(controller, request_id) for request_id in ids))
    assert all(isinstance(result, rs.LossOutput) for result in results)
    assert backend.calls[1:] == [("forward_backward 7", model_id)] * 8
    assert memory.num_bytes == 0


async def test_answers_beyond_the_bound_are_read_from_the_journal(controller: Controller):
    _, model_id = await model_in(controller)
    controller.results._limit_bytes = 10_000
    ids = [await controller.submit(batch(model_id, i)) for i in range(1, 200)]
    await done(controller, ids[-1])
    assert ids[0] not in controller.results and controller.results.num_bytes <= 10_000
    assert isinstance(await done(controller, ids[0]), rs.LossOutput)
    assert await controller.submit(batch(model_id, 1), ids[0]) == ids[0], "a repeat is still known"


@pytest.mark.parametrize("large", [False, True])
async def test_concurrent_requests_with_the_same_id_run_once(
    controller: Controller, large: bool, monkeypatch: pytest.MonkeyPatch
):
    if large:  # examined in a thread, so all copies pass the first check before one is accepted
        monkeypatch.setattr("skyrl_actors.controller.examine.THREAD_BYTES", 0)
    _, model_id = await model_in(controller)
    backend: FakeBackend = controller.backend  # type: ignore[assignment]
    found = await asyncio.gather(*(controller.submit(batch(model_id), "rtwice") for _ in range(3)))
    assert found == ["rtwice"] * 3
    assert isinstance(await done(controller, "rtwice"), rs.LossOutput)
    await done(controller, await controller.submit(rq.OptimStep(model_id, AdamParams())))
    assert backend.calls[1:] == [("forward_backward 5", model_id), ("optim_step", model_id)]
    assert controller.queue.num_open == 0


async def test_reading_a_payload_is_retried_after_a_fault(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("skyrl_actors.controller.ledger.LONGEST_PAUSE_S", 0.01)
    _, model_id = await model_in(controller)
    backend: FakeBackend = controller.backend  # type: ignore[assignment]
    backend.go.clear()
    memory = controller._ledger.memory
    memory.limit = memory.small = 0
    ids = [await controller.submit(batch(model_id, i)) for i in (1, 2)]
    packs = controller.journal._packs  # type: ignore[attr-defined]
    failures = iter([OSError(24, "Too many open files"), PoolTimeout("QueuePool limit")])
    read = packs.read

    def failing(blob):
        for failure in failures:
            raise failure
        return read(blob)

    monkeypatch.setattr(packs, "read", failing)
    backend.go.set()
    assert all(
        [isinstance(await done(controller, request_id), rs.LossOutput) for request_id in ids]
    )
    assert next(failures, None) is None, "both faults occurred"


async def test_a_journal_with_models_of_another_base_is_refused(
    controller: Controller, tmp_path: Path
):
    """If the shapes agree, restored weights would silently be those of another model."""
    await model_in(controller)
    await controller.close()

    class OtherBase(FakeBackend):
        async def start(self, epoch: int) -> ServedModels:
            return changed(await super().start(epoch), base_model="other")

    def again(backend: FakeBackend) -> Controller:
        journal = SqlJournal(JournalConfig(folder=tmp_path / "journal"), KINDS)
        return Controller(controller.config, backend, journal)

    other = again(OtherBase())
    said = r"has models of base model tiny, and this service has other; .*journal\.folder"
    with pytest.raises(ConfigError, match=said):
        await other.start()
    await other.close()
    same = again(FakeBackend())
    await same.start()
    assert len(same.tenants.models) == 1
    await same.close()


async def test_an_unload_waits_for_ranks_that_restart_and_stops_nobody(controller: Controller):
    """Its sampler's weights have to be rebuilt first, so it is repeated until the ranks are up."""
    backend = controller.backend
    assert isinstance(backend, FakeBackend)
    session, model_id = await model_in(controller)
    sampler = f"{session}:sample:0"
    await done(
        controller,
        await controller.submit(rq.SaveForSampler(model_id=model_id, sampler_id=sampler)),
    )
    up, tries = asyncio.Event(), list[str]()

    async def ready(spec: ModelSpec) -> None:
        await up.wait()

    async def delete_model(spec: ModelSpec) -> None:
        tries.append(spec.model_id)
        if not up.is_set():
            raise PartDown("the policy group is restarting")

    backend.ready, backend.delete_model = ready, delete_model  # type: ignore[method-assign]
    unloading = await controller.submit(rq.Unload(model_id=model_id))
    asyncio.get_running_loop().call_later(0.3, up.set)  # never, if the loop is blocked
    other, _ = await model_in(controller, 1)
    assert isinstance(await done(controller, unloading), rs.Unloaded)
    assert other and len(tries) <= 3


async def test_a_sample_that_waits_for_a_part_stops_nobody(controller: Controller):
    backend = controller.backend
    assert isinstance(backend, FakeBackend)
    session, _ = await model_in(controller)
    sampler = f"{session}:sample:0"
    await controller.open_sampler(sampler, session, "tiny", None)
    up, tries, sample = asyncio.Event(), list[str](), backend.sample

    async def refused(request_id: str, *arguments: Any) -> rs.SampleOutput:
        tries.append(request_id)
        if not up.is_set():
            raise PartDown("the base model was loaded again meanwhile")
        return await sample(request_id, *arguments)

    backend.sample = refused  # type: ignore[method-assign]
    asyncio.get_running_loop().call_later(0.3, up.set)  # never, if the loop is blocked
    params = rq.SamplingParams(max_tokens=2)
    request = rq.Sample(sampler_id=sampler, prompt=(1, 2), params=params, seq_id=1)
    found = await done(controller, await controller.submit(request))
    assert isinstance(found, rs.SampleOutput) and 1 < len(tries) < 20
