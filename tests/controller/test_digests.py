"""Digests of retried requests: the fields that they cover, and their stability."""

from dataclasses import dataclass, field, make_dataclass, replace
from typing import Any

import numpy as np
import pytest

from skyrl_actors.controller.digests import FIELDS_BEFORE, digest_before, digest_of
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.model import AdamParams, LoraSpec, LossCall, ModelSpec
from skyrl_actors.messages.sampling import PromptTargets, SparseLayout

COLUMNS = Columns(
    tokens=np.arange(4, dtype=np.int32),
    offsets=np.array([0, 4]),
    fields={"target_tokens": np.arange(4, dtype=np.int32), "weights": np.ones(4, np.float32)},
)
REQUESTS: dict[str, rq.Request] = {
    "create": rq.CreateModel(
        spec=ModelSpec(model_id="s:train:0", base_model="tiny", lora=LoraSpec(rank=8)),
        session_id="s",
        user_metadata={"a": "b"},
    ),
    "forward_backward": rq.ForwardBackward(
        model_id="s:train:0", columns=COLUMNS, loss=LossCall("cross_entropy", {}), seq_id=3
    ),
    "optim": rq.OptimStep("s:train:0", AdamParams(learning_rate=1e-3), seq_id=4),
    "save": rq.SaveWeights(model_id="s:train:0", name="step-1", seq_id=5, ttl_seconds=60),
    "sampler": rq.SaveForSampler(model_id="s:train:0", sampler_id="x", seq_id=6),
    "external": rq.SaveExternal(model_id="s:train:0", name="out", seq_id=7),
    "load": rq.LoadWeights(
        model_id="s:train:0", path="tinker://a/weights/b", with_optimizer=True, seq_id=8
    ),
    "unload": rq.Unload("s:train:0"),
    "sample": rq.Sample(
        sampler_id="x",
        prompt=(1, 2, 3),
        params=rq.SamplingParams(max_tokens=16, temperature=0.7, stop=("end",)),
        seq_id=9,
    ),
    "scores": rq.Sample(
        sampler_id="x",
        prompt=(1, 2, 3),
        params=rq.SamplingParams(max_tokens=1, prompt_targets=PromptTargets((1, 2), (2, 1))),
        seq_id=10,
    ),
}
# Journals store these values. If one changes, retries that cross an upgrade fail.
DIGESTS = {
    "create": 8027045852135178652,
    "forward_backward": 9075847701522977795,
    "optim": 7665286980843584663,
    "save": 6368944384892597628,
    "sampler": 5492016286666853157,
    "external": 7314360067909865445,
    "load": 8319498489196184709,
    "unload": 4945639288959089351,
    "sample": 9068254134675181485,
    "scores": 6658351770493631990,
}
BEFORE = {
    "create": 1713794708,
    "forward_backward": 278980320,
    "optim": 1428839249,
    "save": 2206273305,
    "sampler": 742253146,
    "external": 819545986,
    "load": 4023711714,
    "unload": 1265182986,
    "sample": 1445357708,
    "scores": 1537553614,
}


def grown(value: Any, **more: Any) -> Any:
    """Return the same value as a later version of this project, with more fields, has it."""
    fields = [(name, type(default), field(default=default)) for name, default in more.items()]
    own = {name: getattr(value, name) for name in type(value).__dataclass_fields__}
    later = make_dataclass(type(value).__name__, fields, bases=(type(value),), frozen=True)
    return later(**own)


@pytest.mark.parametrize("name", REQUESTS)
def test_digests_do_not_change(name: str):
    assert int(digest_of(REQUESTS[name])) == DIGESTS[name]


@pytest.mark.parametrize("name", REQUESTS)
def test_a_retry_matches_the_digest_of_the_earlier_version(name: str):
    request = REQUESTS[name]
    assert digest_before(request) == BEFORE[name]
    assert digest_of(request).matches(BEFORE[name]) and digest_of(request).matches(DIGESTS[name])
    assert not digest_of(request).matches(BEFORE[name] ^ 1) and not digest_of(request).matches(
        DIGESTS[name] ^ 1
    )


@pytest.mark.parametrize("name", REQUESTS)
def test_an_added_field_with_a_default_changes_no_digest(name: str):
    request = grown(REQUESTS[name], later=0.5, also=())
    assert digest_of(request) == digest_of(REQUESTS[name])
    assert digest_of(replace(request, later=0.6)) != digest_of(REQUESTS[name])
    if name != "forward_backward":  # its earlier digest covered only named fields
        assert digest_before(request) == BEFORE[name]
        # A request of the earlier version cannot use the new field.
        assert digest_before(replace(request, later=0.6)) is None


def test_an_added_field_of_a_nested_value_changes_no_digest():
    for request, part in (
        (REQUESTS["sample"], "params"),
        (REQUESTS["optim"], "adam"),
        (REQUESTS["create"], "spec"),
    ):
        changes = {part: grown(getattr(request, part), later=True)}
        later = replace(request, **changes)  # type: ignore[type-var]
        assert digest_of(later) == digest_of(request)
        assert digest_of(later).matches(int(digest_of(request)))


def test_each_field_changes_the_digest():
    base = rq.Sample(
        sampler_id="x", prompt=(1, 2, 3), params=rq.SamplingParams(max_tokens=16), seq_id=1
    )
    params = [
        {"num_samples": 2},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_p": 0.5},
        {"seed": 0},
        {"stop": ()},
        {"stop": (1,)},
        {"stop": ("1",)},
        {"stop": ("1", "2")},
        {"stop": ("1,2",)},
        {"prompt_logprobs": True},
        {"stream": True},
        {"prompt_targets": PromptTargets((2, 1), (1, 2))},
        {"prompt_targets": PromptTargets((1, 2), (1, 2))},
        {"prompt_targets": PromptTargets((1, 2), (1, 2), SparseLayout((0, 1), (1,)))},
    ]
    variants = [base, *(replace(base, params=replace(base.params, **change)) for change in params)]
    variants += [
        replace(base, prompt=(1, 2, 4)),
        replace(base, prompt=(1, 2)),
        replace(base, prompt=(2**70,)),
        replace(base, seq_id=2),
    ]
    assert len({int(digest_of(request)) for request in variants}) == len(variants)
    batch = REQUESTS["forward_backward"]
    assert isinstance(batch, rq.ForwardBackward)
    wide = replace(COLUMNS, widths=np.array([1]))
    other = replace(COLUMNS, fields={**COLUMNS.fields, "weights": np.zeros(4, np.float32)})
    batches = [
        batch,
        *(replace(batch, columns=columns) for columns in (wide, other)),
        replace(batch, forward_only=True),
    ]
    batches += [
        replace(batch, loss=LossCall("ppo", {})),
        replace(batch, loss=LossCall("cross_entropy", {"a": 1.0})),
    ]
    assert len({int(digest_of(request)) for request in batches}) == len(batches)


def test_equal_numbers_and_reordered_keys_have_equal_digests():
    def sample(**options: Any) -> int:
        return digest_of(
            rq.Sample(
                sampler_id="x", prompt=(1,), params=rq.SamplingParams(max_tokens=16, **options)
            )
        )

    assert sample(temperature=1) == sample(temperature=1.0) == sample()
    assert sample(temperature=2) == sample(temperature=2.0)

    def saved(metadata: dict[str, str]) -> int:
        return digest_of(rq.SaveWeights(model_id="m", name="n", user_metadata=metadata))

    assert saved({"a": "1", "b": "2"}) == saved({"b": "2", "a": "1"}) != saved({"a": "2", "b": "1"})


def test_digests_fit_the_column_of_the_journal():
    assert all(2**62 <= int(digest_of(request)) < 2**63 for request in REQUESTS.values())


def test_the_table_of_earlier_fields_contains_only_existing_fields():
    known = {cls.__name__: set(cls.__dataclass_fields__) for cls in _classes()}
    assert set(FIELDS_BEFORE) <= set(known)
    assert all(set(names.split()) <= known[name] for name, names in FIELDS_BEFORE.items())


def _classes() -> list[type]:
    parts: list[Any] = [
        *REQUESTS.values(),
        ModelSpec(model_id="", base_model=""),
        LoraSpec(rank=1),
        AdamParams(),
        rq.SamplingParams(max_tokens=1),
    ]
    return [*(type(part) for part in parts), PromptTargets, SparseLayout]


@dataclass(frozen=True)
class Unknown:
    value: object


def test_a_value_of_an_unknown_type_raises():
    with pytest.raises(TypeError, match="no digest of a object"):
        digest_of(Unknown(object()))  # type: ignore[arg-type]


def test_options_that_losses_got_later_change_no_digest_at_their_defaults():
    """A retry of a request that an earlier version has accepted is still a retry."""

    def request(**later: float) -> rq.ForwardBackward:
        config = {"kl_coef": 0.0, "clip_low_threshold": 0.8, **later}
        columns = Columns(
            tokens=np.arange(4, dtype=np.int32),
            offsets=np.array([0, 4]),
            fields={"weights": np.ones(4, np.float32)},
        )
        return rq.ForwardBackward(
            model_id="m",
            columns=columns,
            loss=LossCall("ppo", config),
            forward_only=False,
            seq_id=1,
        )

    unchanged = {"temperature": 1.0, "top_k": 0.0, "top_p": 1.0}
    assert digest_of(request(**unchanged)) == digest_of(request())
    assert digest_before(request(**unchanged)) == digest_before(request())
    assert digest_of(request(**unchanged | {"top_p": 0.9})) != digest_of(request())
