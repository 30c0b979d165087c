"""SIGTERM and SIGINT while a job runs: its cleanup is done before Ray ends."""

import signal
import subprocess
import sys

import pytest

from tests.conftest import ROOT

JOB = """
import asyncio, os, signal, sys

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGTERM, interrupt)  # as the command line does
signal.signal(signal.SIGINT, signal.default_int_handler)
from skyrl_actors.commands.train import _run_to_end
from skyrl_actors.jobs.answers import together

where, sent = sys.argv[1], int(sys.argv[2])

async def play(number):
    if where == "in an episode" and number == 0:
        os.kill(os.getpid(), sent)
        sum(range(10_000))  # code of the user
    await asyncio.sleep(10)

async def group():
    await together([play(number) for number in range(2)])

async def job():
    try:
        if where == "while it waits":
            asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), sent)
        await together([group(), group()])
    finally:
        await asyncio.sleep(0.1)
        print("cleaned up", flush=True)

with asyncio.Runner() as runner:
    try:
        _run_to_end(job(), runner)
    finally:
        print("Ray ends", flush=True)
"""


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("where", ["in an episode", "while it waits"])
def test_a_job_that_is_interrupted_cleans_up_before_ray_ends(where: str, sent: signal.Signals):
    done = subprocess.run(
        [sys.executable, "-c", JOB, where, str(int(sent))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "cleaned up\nRay ends\n"
    assert done.stderr.splitlines()[-1].startswith("KeyboardInterrupt")
    assert "destroyed" not in done.stderr
