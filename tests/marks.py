"""Which tests need a cluster: Ray, vLLM, training processes or a service of their own."""

import pytest

FIXTURES = {"service", "local_ray", "cluster", "their_server", "runs", "ranks", "postgres"}
FILES = (
    "tests/api/test_console.py",
    "tests/api/test_quick_starts.py",
    "tests/engines/test_external.py",
    "tests/engines/test_gpu_bench.py",
    "tests/engines/test_tempered.py",
    "tests/engines/test_transfer.py",
    "tests/engines/test_transports.py",
    "tests/engines/test_vllm_start.py",
    "tests/groups/test_data_parallel.py",
    "tests/groups/test_supervisor.py",
    "tests/jobs/test_commands.py",
    "tests/matrix/",
    "tests/service/",
)


def mark_clusters(items: list[pytest.Item]) -> None:
    for item in items:
        in_files = item.nodeid.startswith(FILES)
        if in_files or FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.cluster)
