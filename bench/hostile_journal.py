"""The cost of a journal with many answered samples: a restart, and writes during a sweep.

    python -m bench.hostile_journal [--samples 1000000]

The sessions of the samples are alive. The rows have the journal's own types and are inserted in
bulk. A controller restarts in a separate process, with a backend that does nothing. The sweep runs
three times: with no due samples, with all samples due, and that on a copy in memory. The last one
shows the stall without the disk.
"""

import argparse
import asyncio
import os
import re
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa

from bench.harness import emit
from skyrl_actors.config.base_models import TinyBase
from skyrl_actors.config.cluster import ClusterConfig, JournalConfig
from skyrl_actors.controller.controller import Controller
from skyrl_actors.controller.digests import digest_of
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal import rows, tables
from skyrl_actors.journal.encoding import encode
from skyrl_actors.journal.entries import Accepted, Answered, SamplerOpened, SessionOpened
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.journal.packs import Pack
from skyrl_actors.messages.requests import Sample, SamplingParams
from skyrl_actors.messages.results import SampleOutput, Sequence
from skyrl_actors.messages.weights import SamplerWeights
from tests.fakes import FakeBackend

SESSIONS = 200
COMMIT = 64  # samples of one group commit, which are one pack
PAUSE_S = 0.005  # between the small writes
CALM_WRITES = 200
HOUR_S = 3600.0
MEMORY = "/dev/shm"
SETTLE_S, QUIET_S, QUIET_MS = 300.0, 10.0, 10.0  # fsyncs below QUIET_MS for QUIET_S
LONGEST_SWEEP_S = 60.0  # time that is measured; the sweep of a backlog takes longer


def config_of(folder: Path) -> ClusterConfig:
    return ClusterConfig(
        base_model=TinyBase(name="tiny"),
        checkpoint_dir=folder / "checkpoints",
        journal=JournalConfig(folder=folder / "journal"),
    )


def sample(session: int, seq_id: int) -> Sample:
    prompt = tuple(range(1, 33))
    return Sample(
        sampler_id=f"s{session}:sample:0",
        prompt=prompt,
        params=SamplingParams(max_tokens=32, seed=seq_id),
        seq_id=seq_id,
    )


def pairs(first: int, count: int) -> Iterator[tuple[Accepted, Answered]]:
    """Yield samples, each with its answer. The sessions alternate."""
    tokens, logprobs = np.arange(32, dtype=np.int32), np.zeros(32, np.float32)
    result, now = (
        SampleOutput(
            sequences=(Sequence(tokens=tokens, logprobs=logprobs, stop_reason="length"),),
            version="base",
        ),
        time.time() - HOUR_S,
    )
    for number in range(first, first + count):
        session, seq_id = number % SESSIONS, number // SESSIONS
        request, request_id = sample(session, seq_id), f"r{number:032x}"
        digest = digest_of(request)
        stream, session_id = f"s{session}:sample:0", f"s{session}"
        yield (
            Accepted(
                number=number,
                request_id=request_id,
                stream=stream,
                seq_id=seq_id,
                digest=digest,
                model_id=None,
                session_id=session_id,
                accepted_at=now,
                request=request,
            ),
            Answered(
                number=number,
                request_id=request_id,
                result=result,
                effect="none",
                answered_at=now + number * 1e-4,
            ),
        )


async def fill(folder: Path, samples: int) -> None:
    journal = SqlJournal(config_of(folder).journal, KINDS)
    await journal.open("bench")
    for session in range(SESSIONS):
        name = f"s{session}"
        opened = SamplerOpened(
            sampler_id=f"{name}:sample:0",
            session_id=name,
            base_model="tiny",
            model_path=None,
            weights=SamplerWeights(version="base"),
        )
        await journal.write(SessionOpened(name, {}, time.time()), opened)
    packs = folder / "journal" / "packs"
    for first in range(1, samples + 1, 100 * COMMIT):
        made, counted = [], []
        for start in range(first, min(first + 100 * COMMIT, samples + 1), COMMIT):
            some = list(pairs(start, min(COMMIT, samples + 1 - start)))
            pack = Pack(
                [
                    encode(record)
                    for accepted, answered in some
                    for record in (accepted.request, answered.result)
                ]
            )
            (packs / pack.name).write_bytes(b"".join(pack.records))
            counted.append({"name": pack.name, "records": len(pack.records)})
            blobs = pack.blobs()
            for accepted, answered in some:
                row = rows.accepted_row(accepted, next(blobs)) | rows.answered_row(
                    answered, next(blobs)
                )
                del row["of"]
                made.append(row)
        with journal.store.engine.begin() as connection:
            connection.execute(sa.insert(tables.operations), made)
            connection.execute(sa.insert(tables.packs), counted)
    await journal.close()
    quiet(folder)


def quiet(folder: Path) -> None:
    """Wait until the disk has written what the preparation left, for SETTLE_S at most.

    Its fsyncs take up to 800 ms meanwhile, also those of another process.
    """
    os.sync()
    ends = time.monotonic() + SETTLE_S
    while time.monotonic() < ends:
        with Disk(folder) as disk:
            time.sleep(QUIET_S)
        if 1e3 * disk.longest_s < QUIET_MS:
            return


def restart(folder: Path) -> dict[str, float]:
    """Measure a controller's start and the first repeat of an earlier request.

    It runs in a new process.
    """

    async def start() -> dict[str, float]:
        before, began = _peak_mib(), time.perf_counter()
        controller = Controller(
            config_of(folder), FakeBackend(), SqlJournal(config_of(folder).journal, KINDS)
        )
        await controller.start()
        restart_s, grown = time.perf_counter() - began, _peak_mib() - before
        began = time.perf_counter()
        repeated = await controller.submit(sample(7, 0))
        assert repeated == f"r{SESSIONS + 7:032x}" or repeated == f"r{7:032x}", (
            "a repeat must get the id of the first request"
        )
        repeat_ms = 1e3 * (time.perf_counter() - began)
        assert await controller.answers.whole(repeated, 0) is not None
        await controller.close()
        return {
            "restart_s": round(restart_s, 3),
            "restart_mib": round(grown, 1),
            "first_repeat_ms": round(repeat_ms, 1),
        }

    return asyncio.run(start())


def _peak_mib() -> float:
    """Return the peak memory of this process. `ru_maxrss` would include its parent's."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


async def sweep(folder: Path, ahead_s: float) -> dict[str, float]:
    """Measure writes during a sweep. Retention's clock is `ahead_s` seconds ahead."""
    journal = SqlJournal(config_of(folder).journal, KINDS, lambda: time.time() + ahead_s)
    state = await journal.open("bench")
    number, waits, calm_ms = state.next_number, list[float](), 0.0

    async def write() -> None:
        nonlocal number
        began = time.perf_counter()
        await journal.write(
            Accepted(
                number=number,
                request_id=f"w{number}",
                stream="w",
                seq_id=None,
                digest=0,
                model_id=None,
                session_id="s0",
                accepted_at=time.time() + ahead_s,
                request=sample(0, number),
            )
        )
        number += 1
        waits.append(1e3 * (time.perf_counter() - began))
        await asyncio.sleep(PAUSE_S)

    for _ in range(CALM_WRITES):
        await write()
    calm_ms, calm_p50 = max(waits), statistics.median(waits)
    waits.clear()
    with Disk(folder) as disk:
        began, sweeping = time.perf_counter(), asyncio.create_task(journal.sweep())
        while not sweeping.done() and time.perf_counter() - began < LONGEST_SWEEP_S:
            await write()
        took_s = time.perf_counter() - began
        sweeping.cancel()
        await asyncio.gather(sweeping, return_exceptions=True)
    with journal.store.engine.connect() as connection:
        left = connection.execute(
            sa.select(sa.func.count()).where(tables.operations.c.stream != "w")
        ).scalar_one()
    await journal.close()
    return {
        "sweep_s": round(took_s, 2),
        "rows_left": left,
        "disk_ms_longest": round(1e3 * disk.longest_s, 1),
        "calm_ms_p50": round(calm_p50, 2),
        "calm_ms_longest": round(calm_ms, 1),
        "write_ms_p50": round(statistics.median(waits), 2),
        "write_ms_p99": round(sorted(waits)[int(0.99 * (len(waits) - 1))], 1),
        "stall_ms": round(max(waits), 1),
    }


def sweep_in_memory(folder: Path) -> dict[str, float]:
    """Measure a sweep of a copy in memory, where an fsync costs nothing: the code's own stall."""
    with tempfile.TemporaryDirectory(prefix="hostile-journal-", dir=MEMORY) as memory:
        copy = Path(memory) / "copy"
        shutil.copytree(folder, copy)
        return asyncio.run(sweep(copy, 25 * HOUR_S))


class Disk:
    """The longest time of a small fsync of another file: the machine's share of a stall."""

    def __init__(self, folder: Path):
        self.longest_s = 0.0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._probe, args=(folder / "probe",))

    def _probe(self, file: Path) -> None:
        with file.open("wb", buffering=0) as stream:
            while not self._ends.wait(4 * PAUSE_S):
                began = time.perf_counter()
                stream.write(bytes(4096))
                os.fsync(stream.fileno())
                self.longest_s = max(self.longest_s, time.perf_counter() - began)

    def __enter__(self) -> "Disk":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()


def run(samples: int = 1_000_000) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="hostile-journal-", dir=Path.cwd()))
    try:
        began = time.perf_counter()
        asyncio.run(fill(folder, samples))
        made_s = time.perf_counter() - began
        with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
            restarted = fresh.submit(restart, folder).result()
        idle = asyncio.run(sweep(folder, 0.0))
        in_memory = sweep_in_memory(folder)
        all_due = asyncio.run(sweep(folder, 25 * HOUR_S))
        return {
            "samples": samples,
            "sessions": SESSIONS,
            "made_s": round(made_s, 1),
            **restarted,
            **{f"idle_{name}": value for name, value in idle.items()},
            **{f"due_{name}": value for name, value in all_due.items()},
            **{f"memory_{name}": value for name, value in in_memory.items()},
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=1_000_000)
    emit("hostile_journal", run(parser.parse_args().samples))


if __name__ == "__main__":
    main()
