"""The service of a benchmark."""

import signal
import subprocess
import sys

import pytest

from tests.conftest import ROOT

BENCH = """
import time
from bench import harness

harness.cli = lambda *arguments: print(*arguments[:1], flush=True)
with harness.service():
    time.sleep(60)
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_bench_that_is_ended_stops_its_service(sent: signal.Signals):
    with subprocess.Popen(
        [sys.executable, "-c", BENCH], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"serve\n"
        process.send_signal(sent)
        assert process.stdout.read() == b"stop\n"
        assert process.wait(10) != 0
