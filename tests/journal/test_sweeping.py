"""A sweep removes old rows of open sessions, in short steps, and keeps all that is needed."""

import time
from collections import namedtuple
from dataclasses import replace
from typing import Any

import pytest

from skyrl_actors.config.cluster import JournalConfig
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal.entries import (
    Accepted,
    Answered,
    SamplerOpened,
    SamplerRetired,
    SessionEnded,
    SessionOpened,
    SnapshotTaken,
)
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.journal.retention import Retention
from skyrl_actors.journal.sweeping import LARGEST, Sweeper, with_few_images
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.model import AdamParams, LoraSpec, LossCall, ModelSpec
from skyrl_actors.messages.weights import SamplerWeights

MODEL = "s:train:0"
NOW = time.time()
OLD = NOW - 100.0
EMPTY = Columns(tokens=None, offsets=None, fields={})  # type: ignore[arg-type]
WEIGHTS = SamplerWeights(version="v")


def done(number: int, request: Any, at: float = OLD, **answer: Any) -> tuple[Accepted, Answered]:
    """One operation of session "s" with its answer."""
    model_id = None if isinstance(request, rq.Sample) else MODEL
    stream = request.sampler_id if isinstance(request, rq.Sample) else MODEL
    seq_id = getattr(request, "seq_id", None)
    accepted = Accepted(
        number=number,
        request_id=f"r{number}",
        stream=stream,
        seq_id=seq_id,
        digest=7,
        model_id=model_id,
        session_id="s",
        accepted_at=at,
        request=request,
    )
    result = answer.pop("result", rs.Loaded("m", "p"))
    return accepted, Answered(
        number=number,
        request_id=f"r{number}",
        result=result,
        effect=answer.pop("effect", "none"),
        answered_at=at,
        **answer,
    )


def sample(seq_id: int) -> rq.Sample:
    return rq.Sample(
        sampler_id="s:sample:0",
        prompt=(1, 2),
        params=rq.SamplingParams(max_tokens=4),
        seq_id=seq_id,
    )


@pytest.fixture(autouse=True)
def two_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_actors.journal.journal.KEEP_SNAPSHOTS", 2)


async def opened(config: JournalConfig) -> SqlJournal:
    journal = SqlJournal(config.model_copy(update={"retention_s": 50.0}), KINDS, lambda: NOW)
    await journal.open("x")
    if await journal.find("r1") is None:
        await journal.write(SessionOpened("s", {}, OLD))
    return journal


async def snapshot(journal: SqlJournal, number: int, step: int, at: float) -> None:
    staging = await journal.stage_snapshot(MODEL, number)
    (staging / "state").write_bytes(b"x" * 100)
    taken = await journal.seal_snapshot(staging, MODEL, number, step)
    await journal.write(
        SnapshotTaken(
            model_id=MODEL,
            number=number,
            step=step,
            folder=taken.folder,
            num_bytes=100,
            taken_at=at,
        )
    )


async def left(journal: SqlJournal, upto: int = 60) -> list[int]:
    return [number for number in range(1, upto) if await journal.find(f"r{number}")]


async def test_old_samples_of_an_open_session_are_removed_and_younger_ones_kept(
    config: JournalConfig,
):
    journal = await opened(config)
    for number in range(1, 11):
        await journal.write(*done(number, sample(number)))
    for number in range(11, 21):
        await journal.write(*done(number, sample(number), NOW))
    waiting = Accepted(
        number=21,
        request_id="r21",
        stream="s:sample:0",
        seq_id=21,
        digest=7,
        model_id=None,
        session_id="s",
        accepted_at=OLD,
        request=sample(21),
    )
    await journal.write(waiting)
    assert await journal.sweep() > 0
    assert await left(journal) == list(range(11, 22))
    for number in range(11, 21):
        found = await journal.find(f"r{number}")
        assert found is not None and await journal.result(found) == rs.Loaded("m", "p")
    used = {
        blob.pack
        for n in range(11, 22)
        if (op := await journal.find(f"r{n}"))
        for blob in (op.payload, op.result)
        if blob
    }
    assert {file.name for file in (journal.folder / "packs").iterdir()} == used
    newest_answered = await journal.newest_answered("s:sample:0", 10**6, 5)
    assert [op.seq_id for op in newest_answered] == [16, 17, 18, 19, 20]
    await journal.close()


async def test_numbers_of_removed_rows_are_not_reused(config: JournalConfig):
    journal = await opened(config)
    for number in range(1, 6):
        await journal.write(*done(number, sample(number)))
    await journal.sweep()
    assert await left(journal) == []
    await journal.close()
    journal = SqlJournal(config, KINDS)
    assert (await journal.open("x")).next_number == 6
    await journal.close()


async def test_rows_that_determine_a_models_state_are_kept(config: JournalConfig):
    """Kept: the creation, the oldest snapshot's operation, recent failures, samplers' origins."""
    journal = await opened(config)
    step, failed = {"effect": "applied"}, rs.Failure("broke")
    created = rq.CreateModel(
        spec=ModelSpec(model_id=MODEL, base_model="tiny", lora=LoraSpec(rank=4)), session_id="s"
    )
    batch = rq.ForwardBackward(model_id=MODEL, columns=EMPTY, loss=LossCall("ppo", {}))
    await journal.write(*done(1, created, **step))
    for number in range(2, 8):
        await journal.write(
            *done(number, rq.OptimStep(MODEL, AdamParams()), step=number - 1, **step)
        )
    await journal.write(*done(8, batch, result=failed, step=6))
    await journal.write(
        *done(
            9,
            rq.ForwardBackward(
                model_id=MODEL, columns=EMPTY, loss=LossCall("ppo", {}), forward_only=True
            ),
            step=6,
        )
    )
    await journal.write(*done(10, batch, step=6, **step))
    await journal.write(
        *done(11, rq.SaveForSampler(model_id=MODEL, sampler_id="s:sample:0"), step=6)
    )
    await journal.write(
        *done(12, rq.SaveForSampler(model_id=MODEL, sampler_id="s:sample:1"), step=6)
    )
    await journal.write(
        *(
            SamplerOpened(
                sampler_id=f"s:sample:{i}",
                session_id="s",
                base_model="tiny",
                model_path=None,
                weights=WEIGHTS,
                owner=MODEL,
                number=11 + i,
            )
            for i in (0, 1)
        )
    )
    await journal.write(SamplerRetired("s:sample:1"))
    await snapshot(journal, 10, 6, OLD)
    await journal.sweep()
    assert await left(journal) == [1, 7, 8, 10, 11]
    await journal.close()
    journal = SqlJournal(config, KINDS)
    journal_state = await journal.open("x")
    assert [op.number for op in journal_state.operations] == [1, 7, 8, 10]
    assert [(s.number, s.step) for s in journal_state.snapshots] == [(10, 6)]
    assert [s.sampler_id for s in journal_state.samplers] == ["s:sample:0"]
    await journal.close()


async def test_an_unloaded_model_is_removed_with_its_snapshots(
    config: JournalConfig,
):
    journal = await opened(config)
    await journal.write(
        *done(
            1,
            rq.CreateModel(spec=ModelSpec(model_id=MODEL, base_model="tiny"), session_id="s"),
            effect="applied",
        )
    )
    await journal.write(*done(2, rq.OptimStep(MODEL, AdamParams()), effect="applied", step=1))
    await snapshot(journal, 2, 1, OLD)
    await journal.write(*done(3, rq.Unload(MODEL), NOW - 40))
    await journal.sweep()
    assert 3 in await left(journal)
    await journal.close()
    journal = SqlJournal(config.model_copy(update={"retention_s": 50.0}), KINDS, lambda: NOW + 20)
    assert (await journal.open("x")).operations == ()
    await journal.sweep()
    assert await left(journal) == [3], "so that the id is not used again"
    assert await journal.was_unloaded(MODEL) and not await journal.was_unloaded("s:train:1")
    assert not list((journal.folder / "snapshots").iterdir())
    await journal.write(SessionEnded("s", OLD))
    await journal.sweep()
    assert await left(journal) == [] and not list((journal.folder / "packs").iterdir())
    await journal.close()


async def test_an_ended_session_stays_until_its_last_operation_is_answered(config: JournalConfig):
    """Otherwise nothing would remove what was not answered when its session was removed."""
    journal = await opened(config)
    accepted, answered = done(1, rq.OptimStep(MODEL, AdamParams()))
    await journal.write(accepted, SessionEnded("s", OLD))
    await journal.sweep()
    assert await left(journal) == [1]
    await journal.write(answered)
    await journal.sweep()
    assert await left(journal) == []
    await journal.close()


async def test_rows_of_ended_sessions_are_removed_with_their_models(config: JournalConfig):
    journal = await opened(config)
    await journal.write(
        *done(
            1,
            rq.CreateModel(spec=ModelSpec(model_id=MODEL, base_model="tiny"), session_id="s"),
            effect="applied",
        )
    )
    await journal.write(*done(2, sample(1), NOW))
    await snapshot(journal, 1, 0, NOW)
    await journal.write(SessionEnded("s", NOW - 10))
    await journal.sweep()
    assert await left(journal) == [1, 2]
    await journal.write(SessionEnded("s", OLD))
    await journal.sweep()
    assert await left(journal) == [] and not list((journal.folder / "snapshots").iterdir())
    await journal.close()


async def test_a_sweep_consists_of_short_steps(config: JournalConfig):
    journal = await opened(config)
    for first in range(1, 3001, 500):
        await journal.write(
            *(
                entry
                for number in range(first, first + 500)
                for entry in done(number, sample(number))
            )
        )
    sweeper = Sweeper(journal.store, KINDS, Retention(50.0, 2), NOW, (), set())
    steps = [step.rows for step in sweeper.steps()]
    assert sum(steps) == 3000 and max(steps) <= LARGEST and len(steps) > 6
    assert [
        step.rows
        for step in Sweeper(journal.store, KINDS, Retention(50.0, 2), NOW, (), set()).steps()
        if step.rows
    ] == []
    await journal.close()


async def test_queries_of_a_sweep_and_a_start_use_indexes(config: JournalConfig, tmp_path: Any):
    """SQLite's query plans show that no query scans all operations."""
    if config.url is not None:
        return
    journal = await opened(config)
    await journal.write(
        *done(
            1,
            rq.CreateModel(spec=ModelSpec(model_id=MODEL, base_model="tiny"), session_id="s"),
            effect="applied",
        )
    )
    await journal.write(*done(2, rq.OptimStep(MODEL, AdamParams()), effect="applied", step=1))
    await snapshot(journal, 2, 1, OLD)
    await journal.write(*done(3, sample(1)))
    plans: list[str] = []
    engine = journal.store.engine
    from sqlalchemy import event

    @event.listens_for(engine, "before_cursor_execute")
    def explain(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.startswith(("SELECT", "DELETE", "UPDATE")) and not isinstance(
            parameters, list
        ):
            rows = cursor.execute(f"EXPLAIN QUERY PLAN {statement}", parameters).fetchall()
            plans.extend(f"{row[3]}  in  {statement}" for row in rows)

    await journal.sweep()
    journal.store.begin_epoch("y", KINDS)
    await journal.newest_answered("s:sample:0", 10, 10)
    scans = [plan for plan in plans if plan.startswith("SCAN operations")]
    newest = [
        plan for plan in scans if "LIMIT" in plan and "ORDER BY operations.number DESC" in plan
    ]
    assert [
        plan for plan in scans if plan not in newest and "USING" not in plan.split("  in  ")[0]
    ] == []
    assert len(plans) > 10
    await journal.close()


async def test_a_pack_of_two_commits_is_removed_with_the_last_one(config: JournalConfig):
    """Equal requests give equal packs."""
    journal = await opened(config)
    first, answer = done(1, sample(5))
    again = replace(first, number=2, request_id="r2", accepted_at=NOW, seq_id=6)
    await journal.write(first)
    await journal.write(again)
    await journal.write(answer)
    await journal.sweep()
    found = await journal.find("r2")
    assert (
        found is not None
        and await journal.request(found) == sample(5)
        and await left(journal) == [2]
    )
    await journal.close()


def test_a_step_counts_few_images():
    row = namedtuple("row", "images")
    many, few = row(" ".join(["d"] * 150)), row("d")
    assert with_few_images([many, few, many, few]) == [many, few]
    assert with_few_images([row(" ".join(["d"] * 900)), few]) == [row(" ".join(["d"] * 900))]
    assert with_few_images([few, row(None)]) == [few, row(None)]


@pytest.mark.parametrize("session", ["open", "ended"])
async def test_retired_samplers_stay_until_their_weights_are_freed(
    config: JournalConfig, session: str
):
    journal = await opened(config)
    for number, version in enumerate("ab"):
        sampler_id = f"s:sample:{number}"
        await journal.write(
            SamplerOpened(
                sampler_id=sampler_id,
                session_id="s",
                base_model="tiny",
                model_path=None,
                weights=SamplerWeights(version=version),
                owner=MODEL,
                number=1 + number,
            ),
            SamplerRetired(sampler_id),
        )
    if session == "ended":
        await journal.write(SessionEnded("s", OLD))
    await journal.sweep()
    assert len(await journal.retired_weights()) == 2, "they may be about to be freed"
    await journal.sweep({"b", "of nobody"})
    assert [weights.version for weights in await journal.retired_weights()] == ["b"]
    await journal.sweep()
    assert not await journal.retired_weights()
    await journal.close()
