"""Routing: equal prefixes go to the same engine, and no engine is much busier than the others."""

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from skyrl_actors.engines.routing import BOUND, EngineLoads, affinity_key, choose

PROMPTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=60)


def loads(
    busy: Sequence[int], version: Sequence[int] | None = None, adapter: Sequence[int] = ()
) -> EngineLoads:
    """Return loads of engines, all of which have the full weights unless some are named."""
    every = range(len(busy))
    names = tuple(f"engine[{i}]" for i in every)
    return EngineLoads(names, busy, every if version is None else version, adapter)


@given(PROMPTS, st.integers(1, 6))
def test_no_engine_is_busier_than_the_bound(prompts: list[list[int]], engines: int):
    busy = Counter[int]()
    for prompt in prompts:
        chosen = choose(loads([busy[i] for i in range(engines)]), affinity_key("v", prompt))
        busy[chosen] += 1
        assert busy[chosen] <= BOUND * sum(busy.values()) / engines + 1


@given(PROMPTS, st.integers(2, 6))
def test_when_an_engine_goes_only_its_own_keys_move(prompts: list[list[int]], engines: int):
    for prompt in prompts:
        key = affinity_key("v", prompt)
        before = choose(loads([0] * engines), key)
        after = choose(loads([0] * (engines - 1)), key)
        assert before in (after, engines - 1)


@given(st.integers(2, 6), st.data())
def test_the_choice_is_within_the_bound_and_prefers_weights_and_then_an_adapter(
    engines: int, data: st.DataObject
):
    some = st.lists(st.integers(0, engines - 1), unique=True)
    busy = data.draw(st.lists(st.integers(0, 5), min_size=engines, max_size=engines))
    version, adapter = sorted(data.draw(some)), data.draw(some)
    chosen = choose(loads(busy, version, adapter), affinity_key("v", [1]))
    able = version or list(range(engines))
    limit = BOUND * (sum(busy[i] for i in able) + 1) / len(able)
    assert chosen in able
    free = [i for i in able if busy[i] < limit]
    assert chosen in free or len(able) == 1
    assert chosen in adapter or not set(free) & set(adapter) or len(able) == 1


def test_samples_with_one_prefix_stay_together_and_versions_spread():
    idle = loads([0] * 4)
    long = list(range(100))
    assert len({choose(idle, affinity_key("v", [*long, last])) for last in range(20)}) == 1
    assert len({choose(idle, affinity_key(f"v{i}", long)) for i in range(20)}) > 1


def test_loaded_weights_come_before_affinity_and_so_does_a_loaded_adapter():
    key = affinity_key("v", [1])
    own = choose(loads([0] * 3), key)
    other = (own + 1) % 3
    assert choose(loads([0] * 3, version=[other]), key) == other
    assert choose(loads([0] * 3, adapter=[other]), key) == other
    assert choose(loads([0] * 3, version=[]), key) == own, "if none has the weights, any may be it"
    # Not if that engine is busier than the bound allows.
    busy = [9 if i == other else 0 for i in range(3)]
    assert choose(loads(busy, adapter=[other]), key) == own
