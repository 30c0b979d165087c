import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skyrl_actors.groups.sharding import assign_parts


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=60), st.integers(1, 8))
def test_every_row_is_assigned_once_and_loads_are_even(lengths: list[int], ranks: int):
    shares = [parts[0] for parts in assign_parts([np.asarray(lengths, np.int64)], ranks)]
    assert sorted(row for share in shares for row in share) == list(range(len(lengths)))
    loads = [sum(lengths[row] for row in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths)
