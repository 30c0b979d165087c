"""The order of tests, and the deadline of slow ones."""

import time

import pytest

from tests import conftest, marks


class Item:
    """What `marks` reads of a test."""

    fixturenames = ()

    def __init__(self, nodeid: str, *found: pytest.Mark):
        self.nodeid = nodeid
        self._marks = {mark.name: mark for mark in found}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self._marks.get(name)


def item(nodeid: str, is_slow: bool = True, limit_s: int | None = None) -> pytest.Item:
    found = [pytest.mark.slow.mark] if is_slow else []
    found += [pytest.mark.timeout(limit_s).mark] if limit_s else []
    return Item(nodeid, *found)  # type: ignore[return-value]


def test_long_slow_tests_are_the_last_of_their_process():
    names = ["service/test_outside_suites.py::a", "service/test_the_end.py::a"]
    names += ["jax_workers/test_mesh.py::a", "workers/test_families.py::a"]
    ordered = sorted((item(f"tests/{name}") for name in names), key=marks.rank_of)
    assert [one.nodeid.removeprefix("tests/") for one in ordered] == [
        "service/test_the_end.py::a",
        "service/test_outside_suites.py::a",
        "workers/test_families.py::a",
        "jax_workers/test_mesh.py::a",
    ]


def test_only_slow_tests_are_skipped_and_only_after_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
):
    slow = item("tests/jax_workers/test_mesh.py::test_a_mesh[1]")
    fast = item("tests/jax_workers/test_mesh.py::test_fast", is_slow=False)
    monkeypatch.delenv(marks.DEADLINE, raising=False)
    conftest.pytest_runtest_setup(slow)
    monkeypatch.setenv(marks.DEADLINE, f"{time.time() + 60}")
    conftest.pytest_runtest_setup(slow)
    monkeypatch.setenv(marks.DEADLINE, f"{time.time() - 1}")
    conftest.pytest_runtest_setup(fast)
    with pytest.raises(pytest.skip.Exception, match="no time was left"):
        conftest.pytest_runtest_setup(slow)


def test_a_test_with_a_longer_limit_must_begin_earlier(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(marks.DEADLINE, f"{time.time() + 600}")
    for limit_s in (300, marks.USUAL_LIMIT_S, marks.USUAL_LIMIT_S + 500):
        conftest.pytest_runtest_setup(item("tests/a.py::b", limit_s=limit_s))
    with pytest.raises(pytest.skip.Exception, match="no time was left"):
        conftest.pytest_runtest_setup(item("tests/a.py::b", limit_s=marks.USUAL_LIMIT_S + 700))


@pytest.mark.parametrize("file", marks.LAST_FILES)
def test_the_last_files_exist(file: str, pytestconfig: pytest.Config):
    assert (pytestconfig.rootpath / file).is_file()
