"""Routing: equal prefixes go to the same engine, and no engine is much busier than the others."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from skyrl_actors.engines.routing import BOUND, EngineLoad, affinity_key, choose

PROMPTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=60)


def load(index: int, busy: int = 0, version: bool = True, adapter: bool = True) -> EngineLoad:
    return EngineLoad(
        name=f"engine[{index}]",
        in_flight=busy,
        waiting=0,
        holds_version=version,
        holds_adapter=adapter,
    )


@given(PROMPTS, st.integers(1, 6))
def test_no_engine_is_busier_than_the_bound(prompts: list[list[int]], engines: int):
    busy = Counter[int]()
    for prompt in prompts:
        chosen = choose([load(i, busy[i]) for i in range(engines)], affinity_key("v", prompt))
        busy[chosen] += 1
        assert busy[chosen] <= BOUND * sum(busy.values()) / engines + 1


@given(PROMPTS, st.integers(2, 6))
def test_when_an_engine_goes_only_its_own_keys_move(prompts: list[list[int]], engines: int):
    for prompt in prompts:
        key = affinity_key("v", prompt)
        before = choose([load(i) for i in range(engines)], key)
        after = choose([load(i) for i in range(engines - 1)], key)
        assert before in (after, engines - 1)


def test_samples_with_one_prefix_stay_together_and_versions_spread():
    idle = [load(i) for i in range(4)]
    long = list(range(100))
    assert len({choose(idle, affinity_key("v", [*long, last])) for last in range(20)}) == 1
    assert len({choose(idle, affinity_key(f"v{i}", long)) for i in range(20)}) > 1


def test_loaded_weights_come_before_affinity_and_so_does_a_loaded_adapter():
    key = affinity_key("v", [1])
    own = choose([load(i) for i in range(3)], key)
    other = (own + 1) % 3
    assert choose([load(i, version=i == other) for i in range(3)], key) == other
    assert choose([load(i, adapter=i == other) for i in range(3)], key) == other
    # Not if that engine is busier than the bound allows.
    assert (
        choose([load(i, busy=9 if i == other else 0, adapter=i == other) for i in range(3)], key)
        == own
    )
