"""Quotas of API keys: rates, the day, open requests, weights, and what a restart keeps."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_actors.config.base_models import TinyBase
from skyrl_actors.config.cluster import ClusterConfig, HttpConfig, JournalConfig, LimitsConfig
from skyrl_actors.config.keys import hashed, owner_of_name
from skyrl_actors.controller.controller import Controller
from skyrl_actors.controller.quotas import Quotas, Reserved
from skyrl_actors.controller.shares import Shares
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.errors import (
    CapacityError,
    InvalidRequest,
    NotFound,
    QuotaUsed,
    Unavailable,
)
from skyrl_actors.messages.model import LoraSpec, ModelSpec
from skyrl_actors.messages.usage import ALL_KEYS, DAY_S, HOUR_S, OwnerQuota, Quota, Usage
from tests.fakes import FakeBackend

NOON = 20_000 * DAY_S + DAY_S // 2
ANN, BOB, CAT = (owner_of_name(name, "") for name in ("ann", "bob", "cat"))


class Clock:
    def __init__(self) -> None:
        self.now = float(NOON)

    def __call__(self) -> float:
        return self.now


def quotas(clock: Clock, owner: str = ANN, **limits: Any) -> Quotas:
    made = Quotas(clock)
    made.set(OwnerQuota(owner=owner, name="ann", quota=Quota(**limits)))
    return made


def used(owner: str = ANN, hour: int = NOON, **counts: int) -> Usage:
    return Usage(hour=hour, owner=owner, session_id="s", base_model="m", **counts)


def admitted(made: Quotas, tokens: int = 0, tries: int = 1000) -> int:
    for number in range(tries):
        try:
            made.admit(ANN, tokens, 0)
        except CapacityError:
            return number
    return tries


def test_requests_of_a_minute_are_bounded_and_come_back_evenly():
    clock = Clock()
    made = quotas(clock, requests_per_minute=60)
    assert admitted(made) == 60
    with pytest.raises(CapacityError, match=r"its 60 requests per minute .*try again in 1\.0 s"):
        made.admit(ANN, 0, 0)
    made.admit(BOB, 0, 0)  # has no quota
    clock.now += 5.5
    assert admitted(made) in (5, 6)
    clock.now += 3600
    assert admitted(made) == 60


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 500), st.integers(0, 500)), max_size=60))
def test_tokens_exceed_the_rate_by_one_request_at_most(
    events: list[tuple[float, int, int]],
):
    """Of requests one after another, with sampled tokens that are known only at the end."""
    clock = Clock()
    made, began, total, last = quotas(clock, tokens_per_minute=600), clock.now, 0, 0
    for pause_s, prompt, sampled in events:
        clock.now += pause_s
        try:
            made.admit(ANN, prompt, 0)
        except CapacityError:
            continue
        allowed = 600 + (clock.now - began) * 10
        assert total <= allowed + 1e-6
        made.answered(used(prompt_tokens=prompt, sampled_tokens=sampled))
        last = prompt + sampled
        total += last
    assert total <= 600 + (clock.now - began) * 10 + last + 1e-6


def test_a_request_larger_than_a_minute_allows_is_admitted_and_paid_off():
    clock = Clock()
    made = quotas(clock, tokens_per_minute=100)
    made.admit(ANN, 1000, 0)
    with pytest.raises(CapacityError, match="tokens per minute"):
        made.admit(ANN, 1, 0)
    clock.now += 60 * 9 + 1
    made.admit(ANN, 1, 0)


def test_tokens_of_the_day_end_at_midnight():
    clock = Clock()
    made = quotas(clock, tokens_per_day=100)
    made.answered(used(trained_tokens=60))
    made.answered(used(prompt_tokens=30, sampled_tokens=9))
    made.answered(used(BOB, trained_tokens=500))
    made.admit(ANN, 1000, 0)
    made.answered(used(sampled_tokens=1))
    with pytest.raises(QuotaUsed, match=r"used 100 tokens today and may use 100 .*in 12\.0 h"):
        made.admit(ANN, 0, 0)
    clock.now += DAY_S / 2
    made.admit(ANN, 0, 0)
    assert made.today(ANN) == 0


def test_open_requests_reserve_what_they_may_use_of_the_day():
    made = quotas(Clock(), tokens_per_day=100)
    for number in range(2):  # the second may exceed the limit by itself
        made.admit(ANN, 10, number, Reserved(samples=60))
    with pytest.raises(CapacityError, match=r"may use 120 tokens, and 100 are left .*per_day"):
        made.admit(ANN, 0, 2, Reserved(samples=1))
    made.admit(ANN, 0, 2)  # a step
    made.admit(ANN, 90, 2, Reserved(training=90))
    made.admit(ANN, 90, 3, Reserved(training=90))
    with pytest.raises(CapacityError, match="may use 180 tokens"):
        made.admit(ANN, 1, 4, Reserved(training=1))
    for _ in range(2):
        made.release(ANN, Reserved(training=90))
        made.release(ANN, Reserved(samples=60))
    made.answered(used(prompt_tokens=10, sampled_tokens=20))
    made.admit(BOB, 1000, 0, Reserved(samples=1000))
    made.admit(ANN, 1, 0, Reserved(samples=1))
    made.answered(used(sampled_tokens=70))
    with pytest.raises(QuotaUsed, match="used 100 tokens"):
        made.admit(ANN, 0, 0)


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(1, 400)), max_size=80))
def test_the_day_is_exceeded_by_one_request_of_each_kind_at_most(
    events: list[tuple[bool, bool, int]],
):
    made, open_requests = quotas(Clock(), tokens_per_day=1000), list[Reserved]()
    for comes, is_sample, tokens in events:
        if comes or not open_requests:
            reserved = Reserved(samples=tokens) if is_sample else Reserved(training=tokens)
            with suppress(CapacityError, QuotaUsed):
                made.admit(ANN, 0, len(open_requests), reserved)
                open_requests.append(reserved)
        else:
            reserved = open_requests.pop()
            made.release(ANN, reserved)
            made.answered(used(sampled_tokens=sum(reserved)))
    for kind in (0, 1):
        assert sum(one[kind] for one in open_requests) < 1000 + 400
    for reserved in open_requests:
        made.release(ANN, reserved)
    assert not made._reserved


async def test_many_samples_at_once_do_not_exceed_the_day(tmp_path: Path, clock: Clock):
    controller = controller_on(tmp_path, clock)
    await controller.start()
    await controller.admin.usage.set_quota("ann", Quota(tokens_per_day=100), "eve")
    session = await session_of(controller, ANN)
    sampler = f"{session}:sample:0"
    await controller.open_sampler(sampler, session, "tiny", None)
    params = rq.SamplingParams(max_tokens=30)
    accepted = list[str]()
    for number in range(20):
        sample = rq.Sample(sampler_id=sampler, prompt=(1,) * 20, params=params, seq_id=number)
        with suppress(CapacityError):
            accepted.append(await controller.submit(sample, f"r{number}0k{ANN}"))
    assert len(accepted) == 2
    for request_id in accepted:
        assert await controller.answers.whole(request_id, 5) is not None
    assert not controller.admin.quotas._reserved
    await controller.close()


async def test_new_sessions_count_for_the_rate(tmp_path: Path, clock: Clock):
    controller = controller_on(tmp_path, clock)
    await controller.start()
    await controller.admin.usage.set_quota("ann", Quota(requests_per_minute=2), "eve")
    first = await session_of(controller, ANN)
    await controller.create_session(f"sother0k{ANN}")
    with pytest.raises(CapacityError, match="2 requests per minute"):
        await controller.create_session(f"sthird0k{ANN}")
    assert await controller.create_session(first) == first  # a repeat
    await controller.close()


def test_a_clock_that_goes_back_gives_no_tokens():
    clock = Clock()
    made = quotas(clock, requests_per_minute=2)
    assert admitted(made) == 2
    clock.now -= 3600
    assert admitted(made) == 0
    clock.now += 29
    assert admitted(made) == 1


def test_keys_without_a_quota_have_that_of_all_keys():
    clock = Clock()
    made = quotas(clock, ALL_KEYS, open_requests=1, weight=2.0)
    with pytest.raises(CapacityError, match="1 requests of this API key are open"):
        made.admit(BOB, 0, 1)
    made.set(OwnerQuota(owner=BOB, name="bob", quota=Quota()))
    with pytest.raises(CapacityError):  # a weight is no limit
        made.admit(BOB, 0, 1)
    made.set(OwnerQuota(owner=CAT, name="cat", quota=Quota(models=3)))
    made.admit(CAT, 0, 1)
    assert (made.weight(ANN), made.weight(BOB), made.weight("")) == (2.0, 1.0, 1.0)
    made.admit("", 0, 1)  # without API keys there are no quotas


def test_a_changed_limit_counts_at_once():
    clock = Clock()
    made = quotas(clock, requests_per_minute=1)
    assert admitted(made) == 1
    made.set(OwnerQuota(owner=ANN, name="ann", quota=Quota(requests_per_minute=5)))
    assert admitted(made) == 5
    made.set(OwnerQuota(owner=ANN, name="ann", quota=Quota()))
    assert admitted(made) == 1000


@pytest.mark.parametrize(("weight", "held"), [(1.0, 50), (3.0, 75), (0.25, 20)])
def test_a_key_of_a_weight_holds_that_part_beside_what_is_free(weight: float, held: int):
    shares = Shares(limit=100, floor=0, weight=lambda _: weight)
    shares.take("a", 1)  # a key without units may take all free ones
    while shares.has_room("a", 1):
        shares.take("a", 1)
    assert shares.held("a") == held


# With a controller and a journal


@pytest.fixture
def clock() -> Clock:
    return Clock()


def controller_on(folder: Path, clock: Clock, **limits: int) -> Controller:
    config = ClusterConfig(
        base_model=TinyBase(name="tiny"),
        http=HttpConfig(api_keys=(hashed("ann=tml-of-ann-123"), hashed("bob=tml-of-bob-123"))),
        checkpoint_dir=folder / "checkpoints",
        limits=LimitsConfig(**limits),
    )
    journal = SqlJournal(JournalConfig(folder=folder / "journal"), KINDS, clock)
    return Controller(config, FakeBackend(), journal, clock)


async def sampled(controller: Controller, session: str, number: int, tokens: int) -> rs.Result:
    sampler = await controller.open_sampler(f"{session}:sample:0", session, "tiny", None)
    request = rq.Sample(
        sampler_id=sampler.sampler_id,
        prompt=(1, 2, 3),
        params=rq.SamplingParams(max_tokens=tokens, seed=1),
        seq_id=number,
    )
    name = f"r{number}k{session[-10:]}"
    await controller.submit(request, name)
    result = await controller.answers.whole(name, 5)
    assert result is not None
    return result


async def session_of(controller: Controller, owner: str, name: str = "s1") -> str:
    return await controller.create_session(f"{name}k{owner}")


async def test_usage_is_added_with_each_answer_and_kept(tmp_path: Path, clock: Clock):
    controller = controller_on(tmp_path, clock)
    await controller.start()
    session = await session_of(controller, ANN)
    first = await sampled(controller, session, 0, 4)
    clock.now += HOUR_S
    second = await sampled(controller, session, 1, 6)
    assert isinstance(first, rs.SampleOutput) and isinstance(second, rs.SampleOutput)
    lengths = [len(one.sequences[0].tokens) for one in (first, second)]
    await controller.close()
    again = controller_on(tmp_path, clock)
    await again.start()
    found = await again.admin.usage.usage(0, clock.now + 1, ANN)
    hours = [(one.hour, one.requests, one.prompt_tokens, one.sampled_tokens) for one in found]
    assert hours == [(NOON, 1, 3, lengths[0]), (NOON + HOUR_S, 1, 3, lengths[1])]
    assert {(one.session_id, one.base_model) for one in found} == {(session, "tiny")}
    assert await again.admin.usage.usage(0, clock.now, BOB) == []
    assert again.admin.quotas.today(ANN) == 6 + sum(lengths)
    await again.close()


async def test_the_quota_of_a_name_holds_after_a_restart(tmp_path: Path, clock: Clock):
    controller = controller_on(tmp_path, clock)
    await controller.start()
    quota = Quota(tokens_per_day=4, weight=2.0)
    stored = await controller.admin.usage.set_quota("ann", quota, "eve")
    assert await controller.admin.usage.set_quota("ann", quota, "eve") == stored  # a repeat
    session = await session_of(controller, ANN)
    await sampled(controller, session, 0, 4)
    await controller.close()
    again = controller_on(tmp_path, clock)
    await again.start()
    assert await again.admin.usage.list_quotas() == [stored]
    with pytest.raises(QuotaUsed):
        await sampled(again, session, 1, 4)
    await sampled(again, await session_of(again, BOB, "s2"), 0, 4)
    acts = [(entry.act, entry.subject) for entry in await again.admin.log.audit(10)]
    assert acts == [("limit", "ann: tokens_per_day 4, weight 2")]
    await again.close()


async def test_models_samplers_and_checkpoints_are_bounded(tmp_path: Path, clock: Clock):
    controller = controller_on(tmp_path, clock)
    await controller.start()
    quota = Quota(models=1, samplers=1, checkpoint_bytes=1)
    await controller.admin.usage.set_quota("ann", quota, "eve")
    session = await session_of(controller, ANN)

    async def answer(request: rq.Request) -> rs.Result:
        found = await controller.answers.whole(await controller.submit(request), 5)
        assert found is not None
        return found

    spec = ModelSpec(model_id=f"{session}:train:0", base_model="tiny", lora=LoraSpec(rank=4))
    await answer(rq.CreateModel(spec=spec, session_id=session))
    other = replace(spec, model_id=f"{session}:train:1")
    with pytest.raises(CapacityError, match="1 models of this API key"):
        await controller.submit(rq.CreateModel(spec=other, session_id=session))
    await controller.open_sampler(f"{session}:sample:0", session, "tiny", None)
    with pytest.raises(CapacityError, match="1 samplers of this API key"):
        await controller.open_sampler(f"{session}:sample:1", session, "tiny", None)
    unnamed = await answer(
        rq.SaveForSampler(model_id=spec.model_id, sampler_id=f"{session}:sample:2")
    )
    assert isinstance(unnamed, rs.Failure) and "1 samplers of this API key" in unnamed.message
    assert isinstance(await answer(rq.SaveWeights(model_id=spec.model_id, name="one")), rs.Saved)
    refused = await answer(rq.SaveWeights(model_id=spec.model_id, name="two"))
    assert isinstance(refused, rs.Failure) and refused.category == "user"
    assert "may have 1 (checkpoint_bytes)" in refused.message
    await controller.close()


@pytest.mark.parametrize(
    ("which", "quota", "said"),
    [
        ("zoe", Quota(), "no valid key has the id or name 'zoe'"),
        ("ann", Quota(requests_per_minute=0), "requests_per_minute is 0; use 1 to"),
        ("ann", Quota(models=-1), "models is -1; use 0 to"),
        ("ann", Quota(weight=0.0), "the weight is 0.0; use more than 0"),
        ("ann", Quota(weight=float("nan")), "the weight is nan"),
    ],
)
async def test_a_wrong_quota_is_refused(
    which: str, quota: Quota, said: str, tmp_path: Path, clock: Clock
):
    controller = controller_on(tmp_path, clock)
    await controller.start()
    with pytest.raises((InvalidRequest, NotFound), match=said):
        await controller.admin.usage.set_quota(which, quota, "eve")
    assert (
        await controller.admin.usage.list_quotas() == []
        and await controller.admin.log.audit(9) == []
    )
    await controller.close()


async def test_a_refused_request_takes_nothing_of_the_quota(tmp_path: Path, clock: Clock):
    """SDKs send it again, until it is accepted."""
    controller = controller_on(tmp_path, clock, open_requests=1)
    await controller.start()
    await controller.admin.usage.set_quota("ann", Quota(requests_per_minute=3), "eve")
    session = await session_of(controller, ANN)
    controller.backend.go.clear()
    spec = ModelSpec(model_id=f"{session}:train:0", base_model="tiny", lora=LoraSpec(rank=4))
    await controller.submit(rq.CreateModel(spec=spec, session_id=session), f"r0k{ANN}")
    for number in range(1, 30):
        save = rq.SaveWeights(model_id=spec.model_id, name="x", seq_id=number)
        with pytest.raises(CapacityError, match="requests of this API key are open"):
            await controller.submit(save, f"r{number}k{ANN}")
    controller.backend.go.set()
    assert isinstance(await controller.answers.whole(f"r0k{ANN}", 5), rs.ModelCreated)
    await sampled(controller, session, 0, 4)
    await controller.close()


async def test_a_request_that_the_journal_refuses_is_given_back(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    controller = controller_on(tmp_path, clock)
    await controller.start()
    await controller.admin.usage.set_quota("ann", Quota(requests_per_minute=2), "eve")
    session = await session_of(controller, ANN)
    await controller.open_sampler(f"{session}:sample:0", session, "tiny", None)

    async def refuse(*_: object) -> None:
        raise Unavailable("no space left")

    monkeypatch.setattr(controller.journal, "write", refuse)
    for number in range(5):
        with pytest.raises(Unavailable):
            await sampled(controller, session, number, 4)
    monkeypatch.undo()
    await sampled(controller, session, 9, 4)
    await controller.close()


async def test_a_key_without_tokens_can_still_free_its_model(tmp_path: Path, clock: Clock):
    controller = controller_on(tmp_path, clock)
    await controller.start()
    session = await session_of(controller, ANN)
    spec = ModelSpec(model_id=f"{session}:train:0", base_model="tiny", lora=LoraSpec(rank=4))
    created = await controller.submit(rq.CreateModel(spec=spec, session_id=session), f"r0k{ANN}")
    await controller.answers.whole(created, 5)
    await controller.admin.usage.set_quota("ann", Quota(tokens_per_day=0, open_requests=0), "eve")
    unload = await controller.submit(rq.Unload(spec.model_id), f"r1k{ANN}")
    assert isinstance(await controller.answers.whole(unload, 5), rs.Unloaded)
    await controller.close()


async def test_samplers_are_bounded_also_when_opened_at_once(tmp_path: Path, clock: Clock):
    controller = controller_on(tmp_path, clock)
    await controller.start()
    await controller.admin.usage.set_quota("ann", Quota(samplers=2), "eve")
    session = await session_of(controller, ANN)
    opened = await asyncio.gather(
        *(
            controller.open_sampler(f"{session}:sample:{n}", session, "tiny", None)
            for n in range(20)
        ),
        return_exceptions=True,
    )
    assert sum(isinstance(one, CapacityError) for one in opened) == 18
    assert len(controller.tenants.samplers) == 2
    await controller.close()


async def test_versions_of_one_model_are_one_sampler(tmp_path: Path, clock: Clock):
    """A training loop that saves weights for each step does not end at the quota."""
    controller = controller_on(tmp_path, clock)
    await controller.start()
    await controller.admin.usage.set_quota("ann", Quota(samplers=1), "eve")
    session = await session_of(controller, ANN)
    spec = ModelSpec(model_id=f"{session}:train:0", base_model="tiny", lora=LoraSpec(rank=4))
    await controller.answers.whole(
        await controller.submit(rq.CreateModel(spec=spec, session_id=session)), 5
    )
    for number in range(4):
        request = rq.SaveForSampler(
            model_id=spec.model_id, sampler_id=f"{session}:sample:{number}", seq_id=number + 1
        )
        saved = await controller.answers.whole(await controller.submit(request), 5)
        assert isinstance(saved, rs.SamplerSaved), saved
    await controller.close()


async def test_a_cancelled_sample_has_used_its_prompt_and_what_was_read(
    tmp_path: Path, clock: Clock
):
    controller = controller_on(tmp_path, clock)
    await controller.start()
    session = await session_of(controller, ANN)
    sampler = await controller.open_sampler(f"{session}:sample:0", session, "tiny", None)
    started = asyncio.Event()

    async def endless(*_: object) -> rs.SampleOutput:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def partial(request_id: str, have: int, timeout_s: float) -> rs.PartialSample:
        return rs.PartialSample((7, 7), (-1.0, -1.0))

    backend: Any = controller.backend
    backend.sample, backend.partial = endless, partial
    params = rq.SamplingParams(max_tokens=50, seed=1, stream=True)
    request = rq.Sample(sampler_id=sampler.sampler_id, prompt=(1, 2, 3), params=params, seq_id=0)
    name = await controller.submit(request, f"r1k{ANN}")
    await started.wait()
    for have in (0, 2, 4):
        await controller.answers.partial(name, have, 1.0)
    await controller.cancel_sample(name)
    assert isinstance(await controller.answers.whole(name, 5), rs.Failure)
    (found,) = await controller.admin.usage.usage(0, clock.now + 1, ANN)
    assert (found.failed, found.prompt_tokens, found.sampled_tokens) == (1, 3, 6)
    await controller.close()


async def test_a_sample_that_failed_has_used_no_tokens(tmp_path: Path, clock: Clock):
    controller = controller_on(tmp_path, clock)
    await controller.start()
    session = await session_of(controller, ANN)
    sampler = await controller.open_sampler(f"{session}:sample:0", session, "tiny", None)

    async def fails(*_: object) -> rs.SampleOutput:
        raise NotFound("no checkpoint")

    backend: Any = controller.backend
    backend.sample = fails
    params = rq.SamplingParams(max_tokens=50, seed=1)
    request = rq.Sample(sampler_id=sampler.sampler_id, prompt=(1, 2, 3), params=params, seq_id=0)
    name = await controller.submit(request, f"r1k{ANN}")
    assert isinstance(await controller.answers.whole(name, 5), rs.Failure)
    (found,) = await controller.admin.usage.usage(0, clock.now + 1, ANN)
    assert (found.failed, found.prompt_tokens, found.sampled_tokens) == (1, 0, 0)
    await controller.close()
