"""Which tests need a cluster or take long, and the order and the processes in which they run.

A cluster is Ray, vLLM, training processes or a service of their own.
"""

import os
import time

import pytest

FIXTURES = {"service", "local_ray", "cluster", "their_server", "ranks", "postgres"}
FILES = (
    "tests/api/test_console.py",
    "tests/api/test_quick_starts.py",
    "tests/engines/test_gpu_bench.py",
    "tests/engines/test_processed.py",
    "tests/engines/test_transfer.py",
    "tests/engines/test_transports.py",
    "tests/engines/test_vllm_start.py",
    "tests/groups/test_data_parallel.py",
    "tests/groups/test_supervisor.py",
    "tests/jobs/test_commands.py",
    "tests/matrix/",
    "tests/service/",
)
# Each takes many seconds of the two minutes that tests without a cluster take.
LONG_FILES = (
    "tests/api/test_fuzz.py",
    "tests/commands/test_haproxy_launcher.py",
    "tests/controller/test_replay.py",
    "tests/docs/test_docs.py",
    "tests/jobs/test_trackers.py",
    "tests/journal/test_journal.py",
    "tests/journal/test_vanished_host.py",
    "tests/observe/test_spans.py",
    "tests/simulation/",
    "tests/transport/test_rpc_bounds.py",
    "tests/workers/test_snapshot.py",
)
# These start Ray, which keeps the address of its cluster in one file of the machine.
RAY_FIXTURES = {"service", "local_ray", "cluster"}
RAY_FILES = (
    "tests/engines/test_external.py::test_adapters",
    "tests/engines/test_gpu_bench.py::test_the_whole_script",
    "tests/jobs/test_commands.py",
    "tests/service/",
)
# Long files after those with Ray. The others follow, because short ones fill the last seconds best.
EARLY_FILES = (
    "tests/workers/test_strategies.py",
    "tests/workers/test_order_of_verbs.py",
    "tests/engines/test_transfer.py",
    "tests/engines/test_vllm_start.py",
    "tests/workers/test_head.py",
    "tests/matrix/",
)
# Slow files that take the most time beside what others test already. They run last.
LAST_FILES = (
    "tests/engines/test_gpu_bench.py",
    "tests/jax_workers/test_mesh.py",
    "tests/service/test_outside_suites.py",
    "tests/service/test_several_base_models.py",
)
# Seconds since the epoch. Slow tests that would begin later are skipped and listed, because a slow
# machine must not reach the time limit of CI, which would hide the results of all. A test that may
# take longer than others must begin earlier by the difference.
DEADLINE = "TEST_DEADLINE"
USUAL_LIMIT_S = 900  # of a slow test, as the Makefile has it


def mark(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(LONG_FILES):
            item.add_marker(pytest.mark.long)
        if item.nodeid.startswith(FILES) or FIXTURES & fixtures_of(item):
            item.add_marker(pytest.mark.cluster)


def arrange(items: list[pytest.Item]) -> None:
    """Order the tests, and name the group of each, which pytest-xdist runs in one process.

    All tests with Ray are one group, in which those with the `service` fixture are last: a test
    that starts and stops Ray in its own process removes the address of the service's Ray. Any other
    file is its own group, so that its fixtures are made once.
    """
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item)))
    items.sort(key=rank_of)


def group_of(item: pytest.Item) -> str:
    return "ray" if uses_ray(item) else item.nodeid.partition("::")[0]


def uses_ray(item: pytest.Item) -> bool:
    return item.nodeid.startswith(RAY_FILES) or bool(RAY_FIXTURES & fixtures_of(item))


def rank_of(item: pytest.Item) -> tuple[bool, ...]:
    early = item.nodeid.startswith(EARLY_FILES)
    return not uses_ray(item), is_last(item), not early, "service" in fixtures_of(item)


def is_last(item: pytest.Item) -> bool:
    return item.nodeid.startswith(LAST_FILES) and item.get_closest_marker("slow") is not None


def skip_after_deadline(item: pytest.Item) -> None:
    deadline = os.environ.get(DEADLINE)
    if not deadline or not item.get_closest_marker("slow"):
        return
    own = item.get_closest_marker("timeout")
    longer_s = max(0, own.args[0] - USUAL_LIMIT_S) if own else 0
    if time.time() > float(deadline) - longer_s:
        pytest.skip(f"no time was left: it would have begun after {DEADLINE}")


def fixtures_of(item: pytest.Item) -> set[str]:
    return set(getattr(item, "fixturenames", ()))
