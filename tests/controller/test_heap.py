"""Objects of a started process are skipped by collections, and cycles among them do not leak."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from skyrl_actors import heap


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


class Node(list["Node"]):
    """One that lists keep in cycles, and that weak references can follow."""


def test_present_objects_are_skipped_until_the_next_call_frees_their_cycles():
    node = Node()
    node.append(node)
    gone = weakref.ref(node)
    heap.keep_present_objects()
    assert gc.get_freeze_count() > 0
    del node
    gc.collect()
    assert gone() is not None, "a collection visited objects that it should skip"
    heap.keep_present_objects()
    assert gone() is None


def test_many_open_requests_are_not_visited_again_and_again():
    heap.keep_present_objects()
    full = 0

    def count(phase: str, info: dict[str, int]) -> None:
        nonlocal full
        full += phase == "start" and info["generation"] == 2

    gc.callbacks.append(count)
    try:
        kept = [[number] for number in range(300_000)]
    finally:
        gc.callbacks.remove(count)
    assert len(kept) == 300_000 and full == 0
