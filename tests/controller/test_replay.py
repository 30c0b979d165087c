"""A controller with a real journal and simulated ranks: damaged files, restarts, lost state."""

import asyncio
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_actors.colocation.healing import MoveHealing
from skyrl_actors.config.base_models import TinyBase
from skyrl_actors.config.cluster import ClusterConfig, JournalConfig
from skyrl_actors.config.restart import RestartConfig
from skyrl_actors.controller import replay, samples
from skyrl_actors.controller.checkpoints import SAVED_BY, SPEC_FILE
from skyrl_actors.controller.controller import Controller
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal.entries import Accepted
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.columns import columns_from
from skyrl_actors.messages.errors import Conflict, InvalidRequest, NotFound, Unavailable
from skyrl_actors.messages.example import Example
from skyrl_actors.messages.model import AdamParams, LoraSpec, LossCall, ModelSpec
from skyrl_actors.messages.paths import parse_path
from skyrl_actors.messages.weights import SamplerWeights
from skyrl_actors.observe.counts import COUNTS
from tests.simulation.backend import Machines, SimBackend
from tests.simulation.journal import Disk


class Service:
    """Start successive controllers on the same machines and journal."""

    def __init__(self, folder: Path):
        self.config = ClusterConfig(
            base_model=TinyBase(name="tiny"),
            checkpoint_dir=folder / "checkpoints",
            journal=JournalConfig(folder=folder / "journal", snapshot_operations=10**6),
            restart=RestartConfig(max_in_a_row=4),
        )
        self.machines = Machines(Disk(), random.Random(0), places=8)

    async def start(self) -> Controller:
        controller = Controller(
            self.config, SimBackend(self.machines), SqlJournal(self.config.journal, KINDS)
        )
        controller.results.ttl_s = 0.01
        await controller.start()
        return controller


@pytest.fixture
def simulated(tmp_path: Path) -> Service:
    return Service(tmp_path)


async def done(controller: Controller, request_id: str) -> rs.Result:
    result = await controller.answers.whole(request_id, 60)
    assert result is not None
    return result


async def made(controller: Controller, session: str) -> str:
    await controller.create_session(session)
    spec = ModelSpec(model_id=f"{session}:train:0", base_model="tiny", lora=LoraSpec(rank=4))
    await done(controller, await controller.submit(rq.CreateModel(spec=spec, session_id=session)))
    return spec.model_id


def batch(model_id: str, token: int, seq_id: int | None = None) -> rq.ForwardBackward:
    tokens = np.full(3, token, np.int32)
    return rq.ForwardBackward(
        model_id=model_id,
        columns=columns_from([Example(tokens, {"target_tokens": tokens})]),
        loss=LossCall("cross_entropy", {}),
        seq_id=seq_id,
    )


async def test_accepted_operations_are_never_answered_with_a_failed_move(simulated: Service):
    """A third of the moves fail, and each failure kills the ranks or the engine.

    An operation has one attempt.
    """
    simulated.config = simulated.config.model_copy(
        update={"restart": RestartConfig(max_in_a_row=1)}
    )
    controller = await simulated.start()
    backend = controller.backend
    assert isinstance(backend, SimBackend)
    # Short enough that the rank has sometimes restarted before the next attempt.
    backend.phase_lock._healing = MoveHealing(first_pause_s=0.2, longest_pause_s=0.2)
    backend.phase_lock._timeout_s = 0.1
    model_id = await made(controller, "s1")
    simulated.machines.failing_moves = 0.33
    for seq_id in range(1, 17, 4):
        trained = await controller.submit(batch(model_id, seq_id, seq_id))
        step = await controller.submit(rq.OptimStep(model_id, AdamParams(), seq_id + 1))
        name = f"s1:sample:{seq_id}"
        saved = await controller.submit(
            rq.SaveForSampler(model_id=model_id, sampler_id=name, seq_id=seq_id + 2)
        )
        assert isinstance(await done(controller, trained), rs.LossOutput)
        assert isinstance(await done(controller, step), rs.StepDone)
        assert isinstance(await done(controller, saved), rs.SamplerSaved)
        sample = rq.Sample(
            sampler_id=name,
            prompt=(1, 2),
            params=rq.SamplingParams(max_tokens=4, seed=1),
            seq_id=seq_id + 3,
        )
        assert isinstance(await done(controller, await controller.submit(sample)), rs.SampleOutput)
    assert sum(f["total"] for f in backend.phase_lock.failures.values()) > 3
    await controller.close()


async def test_all_recoveries_are_counted_although_few_durations_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(replay, "KEPT_TIMES", 2)
    simulated = Service(tmp_path)
    controller = await simulated.start()
    model_id = await made(controller, "s1")
    for seq_id in range(1, 5):
        simulated.machines.kill_rank()
        answer = await done(controller, await controller.submit(batch(model_id, seq_id, seq_id)))
        assert isinstance(answer, rs.LossOutput)
    status = await controller.status()
    assert status["recoveries"] == COUNTS.levels()["recoveries"] >= 4
    assert len(status["recovery_s"]) == 2
    await controller.close()


async def test_a_lost_payload_fails_its_model_and_no_other(simulated: Service):
    controller = await simulated.start()
    one, two = await made(controller, "s1"), await made(controller, "s2")
    await done(controller, await controller.submit(batch(one, 1)))
    request_id = await controller.submit(batch(one, 2))
    await done(controller, request_id)
    lost = await controller.journal.find(request_id)
    answer = await done(controller, await controller.submit(batch(two, 3)))
    assert isinstance(answer, rs.LossOutput) and lost is not None and lost.payload is not None
    (simulated.config.journal.folder / "packs" / lost.payload.pack).unlink()
    simulated.machines.kill_rank()
    failed = await done(controller, await controller.submit(batch(one, 4)))
    assert (
        isinstance(failed, rs.Failure)
        and failed.category == "server"
        and "is missing" in failed.message
    )
    assert isinstance(await done(controller, await controller.submit(batch(two, 4))), rs.LossOutput)
    await controller.close()


async def test_a_lost_creation_fails_its_model_and_no_other(simulated: Service):
    controller = await simulated.start()
    one, two = await made(controller, "s1"), await made(controller, "s2")
    (creation,) = await controller.journal.operations(one, 0, 99)
    assert creation.payload is not None
    await controller.close()
    (simulated.config.journal.folder / "packs" / creation.payload.pack).unlink()
    controller = await simulated.start()
    with pytest.raises(Exception, match=f"model {one} is lost: .* is missing"):
        await controller.submit(batch(one, 1))
    assert isinstance(await done(controller, await controller.submit(batch(two, 1))), rs.LossOutput)
    await controller.close()


async def test_the_service_starts_with_swept_or_damaged_records(simulated: Service):
    controller = await simulated.start()
    one, two = await made(controller, "s1"), await made(controller, "s2")
    assert simulated.machines.rank is not None
    worker = simulated.machines.rank.worker
    worker.faulty = 1

    class Again(set):
        """Make each verb that broke off break off again."""

        def add(self, item: object) -> None:
            worker.faulty = 1

    worker.broken = Again()
    failed_id = await controller.submit(batch(one, 1))
    assert isinstance(await done(controller, failed_id), rs.Failure)
    worker.broken, worker.faulty = set(), 0
    header = await controller.journal.find(failed_id)
    assert header is not None and header.payload is not None and header.result is not None
    await controller.close()
    (simulated.config.journal.folder / "packs" / header.payload.pack).unlink()
    controller = await simulated.start()
    refused = await done(controller, await controller.submit(rq.OptimStep(one, AdamParams())))
    assert isinstance(refused, rs.Failure) and "the reason is lost" in refused.message
    assert isinstance(await done(controller, await controller.submit(batch(two, 1))), rs.LossOutput)
    (simulated.config.journal.folder / "packs" / header.result.pack).unlink(missing_ok=True)
    # The client gets a final answer and does not retry forever.
    lost = await controller.answers.whole(failed_id, 0)
    assert isinstance(lost, rs.Failure) and "is missing" in lost.message
    await controller.close()


async def test_numbers_beyond_64_bits_fail_only_their_own_request(simulated: Service):
    controller = await simulated.start()
    one, two = await made(controller, "s1"), await made(controller, "s2")
    await controller.open_sampler("s1:sample:0", "s1", "tiny", None)
    large = 2**70
    for request in (
        batch(one, 1, seq_id=large),
        batch(one, 1, seq_id=-1),
        rq.Sample(
            sampler_id="s1:sample:0",
            prompt=(1,),
            params=rq.SamplingParams(max_tokens=1, seed=large),
        ),
        rq.Sample(
            sampler_id="s1:sample:0",
            prompt=(1,),
            params=rq.SamplingParams(max_tokens=1, top_k=large),
        ),
        rq.Sample(
            sampler_id="s1:sample:0",
            prompt=(1,),
            params=rq.SamplingParams(max_tokens=1, stop=(large,)),
        ),
    ):
        with pytest.raises(InvalidRequest):
            await controller.submit(request)
    results = await asyncio.gather(
        controller.journal.write(
            Accepted(
                number=10**6,
                request_id="bad",
                stream="x",
                seq_id=None,
                digest=large,
                model_id=None,
                session_id=None,
                accepted_at=0.0,
                request=rq.Unload("x"),
            )
        ),
        controller.submit(batch(two, 1)),
        return_exceptions=True,
    )
    assert isinstance(results[0], InvalidRequest) and controller.journal.trouble is None
    assert isinstance(await done(controller, results[1]), rs.LossOutput)  # type: ignore[arg-type]
    await controller.close()


async def test_accepted_requests_and_answers_survive_the_controller(simulated: Service):
    controller = await simulated.start()
    model_id = await made(controller, "s1")
    first = await controller.submit(batch(model_id, 1, seq_id=1))
    answer = await done(controller, first)
    step = await controller.submit(rq.OptimStep(model_id, AdamParams(), 2), "r-of-the-ingress")
    await done(controller, step)
    await controller.close()
    controller = await simulated.start()
    assert controller.epoch == 2
    again = await controller.answers.whole(first, 0)
    assert isinstance(again, rs.LossOutput) and isinstance(answer, rs.LossOutput)
    assert again.fields["logprobs"].tolist() == answer.fields["logprobs"].tolist()
    # A client without the acknowledgement repeats its request, with its number or through the
    # same ingress.
    assert await controller.submit(batch(model_id, 1, seq_id=1)) == first
    assert (
        await controller.submit(rq.OptimStep(model_id, AdamParams(), 2), "r-of-the-ingress") == step
    )
    status = await controller.status()
    assert [m["steps"] for m in status["models"]] == [1]
    with pytest.raises(NotFound, match="not known"):
        await controller.answers.whole("r-nobody", 0)
    await controller.close()


async def test_a_finished_session_stays_finished(simulated: Service):
    controller = await simulated.start()
    model_id = await made(controller, "s1")
    await controller.finish_session("s1")
    await controller.close()
    controller = await simulated.start()
    with pytest.raises(NotFound, match="unknown session"):
        await controller.heartbeat("s1")
    with pytest.raises(NotFound, match="unknown model"):
        await controller.submit(batch(model_id, 1))
    await controller.close()


async def test_every_call_is_refused_until_the_journal_was_read(simulated: Service):
    """NotFound is final for a client, so it is not returned before all ids are known."""
    controller = Controller(
        simulated.config,
        SimBackend(simulated.machines),
        SqlJournal(simulated.config.journal, KINDS),
    )
    for ask in (
        lambda: controller.submit(batch("s1:train:0", 1)),
        lambda: controller.create_session("s1"),
        lambda: controller.answers.whole("r1", 0),
        lambda: controller.heartbeat("s1"),
    ):
        with pytest.raises(Unavailable, match="still starting"):
            await ask()


async def test_only_the_client_of_an_unstorable_request_gets_an_error(simulated: Service):
    """The requests have numbers beyond 64 bits, or text that is not Unicode.

    No other request waits, and the service stays healthy.
    """
    controller = await simulated.start()
    one, two = await made(controller, "s1"), await made(controller, "s2")
    await controller.open_sampler("s1:sample:0", "s1", "tiny", None)
    large, broken = 2**70, "a\ud800"
    for request in (
        rq.CreateModel(
            spec=ModelSpec(
                model_id="s1:train:1", base_model="tiny", lora=LoraSpec(rank=4), seed=large
            ),
            session_id="s1",
        ),
        rq.CreateModel(
            spec=ModelSpec(model_id="s1:train:1", base_model="tiny", lora=LoraSpec(rank=4)),
            session_id="s1",
            user_metadata={"who": broken},
        ),
        rq.SaveWeights(model_id=one, name=broken),
        rq.SaveWeights(model_id=one, name="c", ttl_seconds=10**15),
        rq.SaveWeights(model_id=one, name="c", user_metadata={broken: "x"}),
        rq.SaveForSampler(model_id=one, sampler_id="s1:sample:" + "1" * 500),
        rq.Sample(
            sampler_id="s1:sample:0",
            prompt=(1,),
            params=rq.SamplingParams(max_tokens=1, stop=(broken,)),
        ),
        rq.Sample(
            sampler_id="s1:sample:0",
            prompt=(1,),
            params=rq.SamplingParams(
                max_tokens=1, prompt_logprobs=True, prompt_logprobs_last_n=large
            ),
        ),
        rq.OptimStep(one, AdamParams(learning_rate=large)),
    ):
        alone, beside = await asyncio.gather(
            controller.submit(request), controller.submit(batch(two, 1)), return_exceptions=True
        )
        assert isinstance(alone, InvalidRequest), request
        str(alone).encode()  # the error can be sent
        assert isinstance(await done(controller, beside), rs.LossOutput)  # type: ignore[arg-type]
        assert controller.readiness.fault() is None
    assert isinstance(await done(controller, await controller.submit(batch(one, 1))), rs.LossOutput)
    await controller.close()


async def test_an_answer_that_cannot_be_stored_is_answered_as_a_failure(simulated: Service):
    controller = await simulated.start()
    model_id = await made(controller, "s1")

    async def strange(*_: object) -> dict[str, float]:
        return {"norm\ud800": 1.0}

    controller.backend.optim_step = strange  # type: ignore[method-assign]
    answer = await done(controller, await controller.submit(rq.OptimStep(model_id, AdamParams())))
    assert (
        isinstance(answer, rs.Failure)
        and answer.category == "server"
        and "cannot be stored" in answer.message
    )
    assert controller.readiness.fault() is None
    await controller.close()


async def test_samples_from_before_a_restart_are_read_on_the_first_request(simulated: Service):
    """A start does not read them. A repeat and the list of answered samples do."""
    controller = await simulated.start()
    await controller.create_session("s1")
    await controller.open_sampler("s1:sample:0", "s1", "tiny", None)
    controller.backend.machines.exports[""] = "base"  # type: ignore[attr-defined]
    requests = [
        rq.Sample(
            sampler_id="s1:sample:0",
            prompt=(1,),
            params=rq.SamplingParams(max_tokens=2, seed=1),
            seq_id=seq_id,
        )
        for seq_id in range(5)
    ]

    async def sampled(*_: object) -> rs.SampleOutput:
        return rs.SampleOutput(sequences=(), version="base")

    controller.backend.sample = sampled  # type: ignore[method-assign]
    ids = [await controller.submit(request) for request in requests]
    for request_id in ids:
        await done(controller, request_id)
    await controller.close()
    controller = await simulated.start()
    controller.backend.sample = sampled  # type: ignore[method-assign]
    assert not controller.queue._accepted
    fresh = await controller.submit(
        rq.Sample(
            sampler_id="s1:sample:0",
            prompt=(1,),
            params=rq.SamplingParams(max_tokens=2, seed=1),
            seq_id=5,
        )
    )
    await done(controller, fresh)
    found, cursor = await controller.answers.completed("s1:sample:0", 0, 0, 5)
    assert [one.request_id for one in found] == [*ids, fresh]
    assert await controller.answers.completed("s1:sample:0", 0, cursor, 0) == ([], cursor)
    assert [await controller.submit(request) for request in requests] == ids
    with pytest.raises(Conflict):
        await controller.submit(
            rq.Sample(
                sampler_id="s1:sample:0",
                prompt=(2,),
                params=rq.SamplingParams(max_tokens=2, seed=1),
                seq_id=0,
            )
        )
    await controller.close()


async def test_versions_of_weights_have_new_names_after_a_restart(simulated: Service):
    controller = await simulated.start()
    model_id = await made(controller, "s1")

    async def saved(number: int) -> str:
        request = rq.SaveForSampler(model_id=model_id, sampler_id=f"s1:sample:{number}")
        result = await done(controller, await controller.submit(request))
        assert isinstance(result, rs.SamplerSaved)
        return result.version

    names = [await saved(0), await saved(1)]
    await controller.close()
    controller = await simulated.start()
    names += [await saved(2), await saved(3)]
    assert len(set(names)) == 4
    await controller.close()


async def test_a_state_whose_operations_were_removed_is_not_rebuilt_without_them(
    simulated: Service,
):
    controller = await simulated.start()
    model_id = await made(controller, "s1")
    for token in range(1, 4):
        await done(controller, await controller.submit(batch(model_id, token)))
        await done(
            controller,
            await controller.submit(rq.OptimStep(model_id, AdamParams(learning_rate=0.1 * token))),
        )
    spec, replayer = controller.tenants.models[model_id].spec, controller._replayer
    position = replayer.progress[model_id].position
    await replayer.write_copy(spec, position, await replayer.copied(spec, position))
    journal = controller.journal
    assert isinstance(journal, SqlJournal)
    now = journal.wall()
    journal.wall = lambda: now + simulated.config.journal.retention_s + 60
    await done(controller, await controller.submit(batch(model_id, 4)))
    await journal.sweep()
    (snapshot,) = await journal.snapshots(model_id)
    folder = str(journal.folder / "snapshots" / snapshot.folder)
    simulated.machines.disk.files[folder] = simulated.machines.disk.files[f"{folder}.partial"]
    # The creation, the last step and the operation after it are left.
    assert len(await journal.operations(model_id, 0, 10**6)) == 3
    simulated.machines.kill_rank()
    assert isinstance(
        await done(controller, await controller.submit(batch(model_id, 5))), rs.LossOutput
    )
    with pytest.raises(NotFound, match="is at step 3; use 0 or 3 to 3; steps before 3 are older"):
        await controller.checkpoint_spec(parse_path(f"tinker://{model_id}/steps/1"))
    (journal.folder / "snapshots" / snapshot.folder / "manifest.json").unlink()
    simulated.machines.kill_rank()
    refused = await done(controller, await controller.submit(batch(model_id, 6)))
    assert (
        isinstance(refused, rs.Failure)
        and "were removed, and no whole snapshot covers them" in refused.message
    )
    await controller.create_session("s2")
    path = f"tinker://{model_id}/steps/0"
    fork = rq.CreateModel(
        spec=ModelSpec(model_id="s2:train:0", base_model=""), session_id="s2", from_path=path
    )
    assert isinstance(
        await done(controller, await controller.submit(fork)), rs.Loaded | rs.ModelCreated
    )
    await controller.close()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("end", ["newer version", "session"])
async def test_accepted_samples_of_a_retired_sampler_get_lost_weights_back(
    simulated: Service, monkeypatch: pytest.MonkeyPatch, end: str
):
    monkeypatch.setattr(samples, "LORA_SAMPLER_VERSIONS", 1)
    controller = await simulated.start()
    backend = controller.backend
    assert isinstance(backend, SimBackend)
    model_id = await made(controller, "s1")
    await done(controller, await controller.submit(batch(model_id, 1)))

    async def saved(name: str) -> rs.Result:
        request = rq.SaveForSampler(model_id=model_id, sampler_id=name)
        return await done(controller, await controller.submit(request))

    sample = rq.Sample(
        sampler_id="s1:sample:0", prompt=(1,), params=rq.SamplingParams(max_tokens=4, seed=1)
    )
    await saved("s1:sample:0")
    expected = await done(controller, await controller.submit(sample))
    backend.devices.engine.clear()
    request_id = await controller.submit(sample)
    await until(lambda: backend.in_use.total())
    if end == "session":
        ending = asyncio.create_task(controller.finish_session("s1"))
        await until(lambda: not controller.tenants.samplers)
    else:
        ending = asyncio.create_task(saved("s1:sample:1"))
        await ending
    simulated.machines.power_cut()
    backend.devices.engine.set()
    answer = await done(controller, request_id)
    assert isinstance(answer, rs.SampleOutput) and isinstance(expected, rs.SampleOutput)
    assert answer.sequences[0].tokens.tolist() == expected.sequences[0].tokens.tolist()
    await ending
    kept = {"export s1:train:0@2"} if end == "newer version" else set[str]()
    exports = simulated.machines.exports  # freed after the last sample
    await until(lambda: {name for name in exports if name.startswith("export ")} == kept)
    await controller.close()


async def test_files_of_retired_samplers_that_a_killed_controller_left_are_removed(
    simulated: Service, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(samples, "LORA_SAMPLER_VERSIONS", 1)
    controller = await simulated.start()
    backend = controller.backend
    assert isinstance(backend, SimBackend)
    model_id = await made(controller, "s1")

    async def nothing(weights: SamplerWeights) -> None: ...

    backend.drop_sampler = nothing  # type: ignore[method-assign]  # killed before it began
    for name in ("s1:sample:0", "s1:sample:1"):
        request = rq.SaveForSampler(model_id=model_id, sampler_id=name)
        await done(controller, await controller.submit(request))
    exports = simulated.machines.exports
    of_first, of_second = sorted(name for name in exports if name.startswith("export "))
    await controller.close()
    controller = await simulated.start()
    await until(lambda: of_first not in exports)
    sample = rq.Sample(
        sampler_id="s1:sample:1", prompt=(1,), params=rq.SamplingParams(max_tokens=4, seed=1)
    )
    assert isinstance(await done(controller, await controller.submit(sample)), rs.SampleOutput)
    assert of_second in exports
    await controller.close()


@pytest.mark.parametrize("ranks", ["die too", "go on"])
async def test_a_load_that_fails_after_a_kill_has_changed_nothing(simulated: Service, ranks: str):
    """The kill comes between the snapshot of the loaded state and the answer."""
    controller = await simulated.start()
    model_id = await made(controller, "s1")
    assert simulated.machines.rank is not None
    apply = simulated.machines.rank.worker.save

    def on_disk(model_id: str, folder: str, mark: str) -> None:
        Path(folder).mkdir(parents=True)
        spec = controller.tenants.models[model_id].spec
        (Path(folder) / SPEC_FILE).write_text(json.dumps(asdict(spec)))
        (Path(folder) / SAVED_BY).write_text(mark)
        apply(model_id, folder, mark)

    simulated.machines.rank.worker.save = on_disk  # type: ignore[method-assign]
    save = rq.SaveWeights(model_id=model_id, name="old")
    saved = await done(controller, await controller.submit(save))
    assert isinstance(saved, rs.Saved)
    await done(controller, await controller.submit(batch(model_id, 1)))
    await done(controller, await controller.submit(rq.OptimStep(model_id, AdamParams())))

    def weights() -> str:
        assert simulated.machines.rank is not None
        return simulated.machines.rank.worker.states[model_id].weights

    trained = weights()

    async def killed(*_: object) -> None:
        await asyncio.Event().wait()

    controller._ledger.answer = killed  # type: ignore[method-assign]
    request_id = await controller.submit(
        rq.LoadWeights(model_id=model_id, path=saved.path, with_optimizer=False)
    )
    journal = controller.journal
    assert isinstance(journal, SqlJournal)
    loaded = await journal.find(request_id)
    assert loaded is not None
    async with asyncio.timeout(30):
        while loaded.number not in [s.number for s in await journal.snapshots(model_id)]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert weights() != trained
    await controller.close()
    if ranks == "die too":
        simulated.machines.kill_rank()
    shutil.rmtree(saved.folder)
    controller = await simulated.start()
    failed = await done(controller, request_id)
    assert isinstance(failed, rs.Failure) and "old" in failed.message
    look = replace(batch(model_id, 2), forward_only=True)
    assert isinstance(await done(controller, await controller.submit(look)), rs.LossOutput)
    assert weights() == trained
    await controller.close()
