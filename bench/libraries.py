"""What own code costs beside the library that could replace it, one JSON line for each case.

    python -m bench.libraries [CASE ...]

`docs/explanation/decisions.md` has the decisions. Nothing here needs Ray or a service to run.
"""

import argparse
import asyncio
import hashlib
import importlib.util
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from bench.harness import emit

KIB, MIB = 2**10, 2**20
CALLS, ROUNDS = 2000, 20


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder on the disk of the working directory; /tmp may be memory."""
    with tempfile.TemporaryDirectory(prefix="libraries-", dir=Path.cwd()) as folder:
        yield Path(folder)


def fastest_us(work: Callable[[], Any]) -> float:
    """Return the microseconds of one call, in the fastest round."""

    def once() -> float:
        began = time.perf_counter()
        for _ in range(CALLS):
            work()
        return (time.perf_counter() - began) / CALLS

    return round(1e6 * min(once() for _ in range(ROUNDS)), 2)


# --- payloads: packs in files against rows of SQLite ---


class Payloads:
    """Durable batches of payloads in an SQLite database, with or without pack files."""

    def __init__(self, folder: Path, in_packs: bool):
        from skyrl_actors.journal.opening import DATABASE, connect, database_url
        from skyrl_actors.journal.packs import PackStore

        (folder / "packs").mkdir(parents=True)
        self._packs = PackStore(folder / "packs") if in_packs else None
        self._packer = ThreadPoolExecutor(1)
        self._database = folder / DATABASE
        self._engine = connect(database_url(folder, None))
        table = sa.Table(
            "payloads", sa.MetaData(), sa.Column("number", sa.Integer, primary_key=True)
        )
        for name in ("pack", "digest"):
            table.append_column(sa.Column(name, sa.String(64)))
        for name in ("offset", "length"):
            table.append_column(sa.Column(name, sa.BigInteger))
        table.append_column(sa.Column("content", sa.LargeBinary))
        table.metadata.create_all(self._engine)
        self._table = table

    def write(self, records: Sequence[bytes]) -> None:
        from skyrl_actors.journal.packs import Pack

        if self._packs is None:
            rows = [{"content": r, "digest": hashlib.sha256(r).hexdigest()} for r in records]
            with self._engine.begin() as connection:
                connection.execute(sa.insert(self._table), rows)
            return
        pack = Pack(records)
        packing = self._packer.submit(self._packs.write, pack)
        with self._engine.begin() as connection:
            connection.execute(
                sa.insert(self._table),
                [
                    {"pack": b.pack, "offset": b.offset, "length": b.length, "digest": b.digest}
                    for b in pack.blobs()
                ],
            )
            packing.result()

    def delete(self) -> None:
        with self._engine.begin() as connection:
            connection.execute(sa.delete(self._table))
        if self._packs is not None:
            self._packs.remove(self._packs.names())

    def sizes(self) -> dict[str, float]:
        wal = self._database.with_name(f"{self._database.name}-wal")
        packs = self._database.parent / "packs"
        return {
            "database_mib": round(self._database.stat().st_size / MIB, 1),
            "log_mib": round(wal.stat().st_size / MIB, 1) if wal.exists() else 0.0,
            "packs_mib": round(sum(f.stat().st_size for f in packs.iterdir()) / MIB, 1),
        }

    def close(self) -> None:
        self._engine.dispose()
        self._packer.shutdown()


def payloads() -> dict[str, Any]:
    """Batches alternate between both ways; sizes before and after all payloads are deleted."""
    found: dict[str, Any] = {}
    for count, size, batches in (
        (1, 4 * KIB, 200),
        (16, 64 * KIB, 60),
        (16, MIB, 20),
        (1, 64 * MIB, 8),
    ):
        with scratch() as folder:
            kinds = {k: Payloads(folder / k, k == "packs") for k in ("packs", "rows")}
            waits: dict[str, list[float]] = {kind: [] for kind in kinds}
            for _ in range(batches):
                records = [os.urandom(size) for _ in range(count)]
                for kind, store in kinds.items():
                    began = time.perf_counter()
                    store.write(records)
                    waits[kind].append(1e3 * (time.perf_counter() - began))
            for kind, store in kinds.items():
                row: dict[str, Any] = {
                    "ack_ms_p50": round(statistics.median(waits[kind]), 2),
                    "ack_ms_max": round(max(waits[kind]), 1),
                    "written": store.sizes(),
                }
                began = time.perf_counter()
                store.delete()
                row |= {"delete_s": round(time.perf_counter() - began, 3), "deleted": store.sizes()}
                found[f"{batches} x {count} x {size // KIB} KiB, {kind}"] = row
                store.close()
    return found


# --- safetensors: one tensor at a time against all at once ---

SHAPE, TENSORS = (2048, 2048), 64  # 1 GiB of float32


def save(kind: str, path: Path) -> dict[str, float]:
    """Save 1 GiB of tensors that are made one by one, in a process of its own."""
    import psutil
    import torch
    from safetensors.torch import save_file

    from skyrl_actors.workers.tensor_files import TensorWriter

    torch.set_num_threads(1)
    names = [f"layer.{i}.weight" for i in range(TENSORS)]
    process, ended = psutil.Process(), threading.Event()
    before, peak = process.memory_info(), [0, 0]

    def watch() -> None:
        while not ended.wait(0.002):
            now = process.memory_info()
            peak[0] = max(peak[0], now.rss - before.rss)
            peak[1] = max(peak[1], (now.rss - now.shared) - (before.rss - before.shared))

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    tensors = ((name, torch.full(SHAPE, float(i))) for i, name in enumerate(names))
    if kind == "own":
        writer = TensorWriter(path, dict.fromkeys(names, SHAPE), torch.float32)
        for name, tensor in tensors:
            writer.put(name, tensor)
    else:
        save_file(dict(tensors), path)
    took = time.perf_counter() - began
    with path.open("rb") as file:
        os.fsync(file.fileno())
    synced = time.perf_counter() - began
    ended.set()
    watcher.join()
    return {
        "seconds": round(took, 2),
        "seconds_with_fsync": round(synced, 2),
        "peak_resident_mib": round(peak[0] / MIB),
        "peak_private_mib": round(peak[1] / MIB),
    }


def safetensors() -> dict[str, Any]:
    """Medians of three alternating processes; resident memory counts mapped pages of the file."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    runs: dict[str, list[dict[str, float]]] = {"own": [], "save_file": []}
    with scratch() as folder:
        for _ in range(3):
            for kind, rows in runs.items():
                with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                    rows.append(pool.submit(save, kind, folder / kind).result())
                (folder / kind).unlink()
    return {
        k: {f: statistics.median(r[f] for r in rows) for f in rows[0]} for k, rows in runs.items()
    }


# --- counters and spans ---


def import_ms(module: str) -> float:
    """Return the milliseconds of an import in a new interpreter."""
    code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    runs = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(5)]
    return round(1e3 * statistics.median(runs))


def counters() -> dict[str, Any]:
    """Count with two tags. Ray is imported and not started.

    `ray_kept_mib` is the growth of memory by 20,000 sets of tags: without any, nothing is recorded.
    """
    import psutil
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from ray.util.metrics import Counter

    from skyrl_actors.observe.counts import Counts

    tags = {"verb": "sample", "outcome": "ok"}
    counts = Counts()
    meters = MeterProvider([InMemoryMetricReader()])
    of_library = meters.get_meter("bench").create_counter("operations")
    of_ray = Counter("bench_operations", "", ("verb", "outcome"))
    found = {
        "own_us": fastest_us(lambda: counts.add("operations", **tags)),
        "opentelemetry_us": fastest_us(lambda: of_library.add(1, tags)),
        "ray_not_started_us": fastest_us(lambda: of_ray.inc(1, tags)),
        "import_ray_ms": import_ms("ray.util.metrics"),
    }
    before = psutil.Process().memory_info().rss
    for i in range(20_000):
        of_ray.inc(1, {"verb": str(i), "outcome": "ok"})
    return found | {"ray_kept_mib": (psutil.Process().memory_info().rss - before) / MIB}


def spans() -> dict[str, Any]:
    """Keep one finished span with three attributes in memory."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from skyrl_actors.observe.spans import Span, Spans

    ring, attributes = Spans(), {"outcome": "ok"}
    kept = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("bench")

    def own() -> None:
        began = time.time()
        ring.add(
            Span(
                name="run",
                row="m",
                began=began,
                seconds=time.time() - began,
                request_id="r1",
                attributes=attributes,
            )
        )

    def of_library() -> None:
        all_attributes = {"row": "m", "request_id": "r1", **attributes}
        tracer.start_span("run", attributes=all_attributes).end()

    return {
        "own_us": fastest_us(own),
        "opentelemetry_us": fastest_us(of_library),
        "own_kept": len(ring.recent),
        "opentelemetry_kept": len(kept.get_finished_spans()),
        "import_opentelemetry_sdk_ms": import_ms("opentelemetry.sdk.trace"),
    }


# --- retries ---


def retries() -> dict[str, Any]:
    """A call that succeeds at once, which nearly all do."""
    from tenacity import AsyncRetrying, retry_if_exception_type, wait_exponential

    async def work() -> None:
        pass

    async def plain() -> None:
        pause_s = 0.05
        while True:
            try:
                return await work()
            except OSError:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 2.0)

    async def tenacity() -> None:
        await AsyncRetrying(
            retry=retry_if_exception_type(OSError),
            wait=wait_exponential(0.05, max=2),
            sleep=asyncio.sleep,
        )(work)

    async def fastest(call: Callable[[], Awaitable[None]]) -> float:
        rounds: list[float] = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            for _ in range(CALLS):
                await call()
            rounds.append((time.perf_counter() - began) / CALLS)
        return round(1e6 * min(rounds), 2)

    return {"plain_us": asyncio.run(fastest(plain)), "tenacity_us": asyncio.run(fastest(tenacity))}


# --- descriptors: built at import against a generated module ---

IMPORT = """
import time, importlib.util, google.protobuf.message_factory, google.protobuf.runtime_version
import google.protobuf.internal.builder, google.protobuf.symbol_database
spec = importlib.util.spec_from_file_location("measured", {path!r})
module = importlib.util.module_from_spec(spec)
began = time.perf_counter()
spec.loader.exec_module(module)
print(1e3 * (time.perf_counter() - began))
"""


def descriptors() -> dict[str, Any]:
    """Both import after protobuf itself. The SDK's module has more messages than ours."""
    from skyrl_actors.api import schema

    package = importlib.util.find_spec("tinker")
    assert package is not None and package.origin is not None
    generated = Path(package.origin).parent / "proto" / "tinker_public_pb2.py"
    found: dict[str, Any] = {}
    for kind, path in (("own", str(schema.__file__)), ("generated", str(generated))):
        command = [sys.executable, "-c", IMPORT.format(path=path)]
        runs = [float(subprocess.check_output(command)) for _ in range(ROUNDS)]
        found[f"{kind}_import_ms"] = round(statistics.median(runs), 2)
        found[f"{kind}_lines"] = len(Path(path).read_text().splitlines())
    return found


# --- the mirror: our folders against a transaction of fsspec ---

FILES = 200
PUT = {
    "fsspec put_file": "with fs.transaction:\n"
    "  for f in files: fs.put_file(str(f), f'{to}/{f.name}')",
    "fsspec open": "with fs.transaction:\n  for f in files:\n"
    "    with fs.open(f'{to}/{f.name}', 'wb') as out: out.write(f.read_bytes())",
    "own": "from skyrl_actors.storage.mirror import Mirror\n"
    "Mirror(source.parent, f'file://{to.parent}', '0').put(source)",
}
COPY = """
import sys, fsspec
from pathlib import Path
source, to = Path(sys.argv[1]), Path(sys.argv[2])
files, fs = sorted(source.iterdir()), fsspec.filesystem("file")
"""


def killed_at(kind: str, folder: Path, visible: int) -> dict[str, Any]:
    """Replace an old copy by a new one, and kill the process when `visible` files are new."""
    source, to, temporary = folder / "c" / "one", folder / "there" / "one", folder / "temporary"
    for each in (source, to, temporary):
        each.mkdir(parents=True)
    for i in range(FILES):
        (source / str(i)).write_bytes(b"old")
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", COPY + PUT[kind], str(source), str(to)]
    subprocess.run(command, env=environment, check=True)
    for i in range(FILES):
        (source / str(i)).write_bytes(b"new" * 50_000)

    def sizes(within: Path) -> list[int]:
        return [f.stat().st_size for f in within.iterdir() if f.name.isdigit()]

    def newest() -> list[int]:
        parts = [p for p in to.iterdir() if p.is_dir()] or [to]
        return [size for part in parts for size in sizes(part) if size != 3]

    with subprocess.Popen(command, env=environment) as process:
        while process.poll() is None:
            try:
                if len(newest()) >= visible:
                    process.send_signal(signal.SIGKILL)
                    break
            except FileNotFoundError:
                continue  # listed, and moved or removed since
        process.wait()
    whole = to / "WHOLE"
    read = sizes(to / whole.read_text() if whole.exists() else to)
    return {
        "old": sum(size == 3 for size in read),
        "new": sum(size == 150_000 for size in read),
        "torn": sum(size not in (3, 150_000) for size in read),
        "left_over_files": len(list(temporary.iterdir())),
    }


def mirror() -> dict[str, Any]:
    """What a reader finds of a folder of 200 files. A copy is consistent if all have one age."""
    found: dict[str, Any] = {}
    for kind in PUT:
        runs: list[dict[str, Any]] = []
        for visible in (1, 20, 50, 100, 150):
            with scratch() as folder:
                runs.append(killed_at(kind, folder, visible))
                shutil.rmtree(folder / "c")
        mixed = sum(FILES not in (run["old"], run["new"]) for run in runs)
        found[kind] = {"kills": len(runs), "inconsistent": mixed, "runs": runs}
    return found


# --- trackers: how long their libraries block without a server ---

NO_SERVER = "http://127.0.0.1:9"
BEGIN = {
    "wandb": "wandb.init(project='bench', settings=wandb.Settings(silent=True))",
    "mlflow": f"mlflow.set_tracking_uri('{NO_SERVER}'); mlflow.start_run()",
}


def trackers() -> dict[str, Any]:
    """Seconds until a library raises that cannot reach its server. This takes minutes."""
    found: dict[str, Any] = {}
    environment = {**os.environ, "WANDB_BASE_URL": NO_SERVER, "WANDB_API_KEY": "a" * 40}
    for kind, begin in BEGIN.items():
        code = f"import time, {kind}\nt = time.perf_counter()\ntry: {begin}\n" + (
            "except Exception as error: print(type(error).__name__, time.perf_counter() - t)"
        )
        with scratch() as folder:
            done = subprocess.run(
                [sys.executable, "-c", code],
                env=environment,
                cwd=folder,
                check=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        error, seconds = done.stdout.splitlines()[-1].split()
        found[kind] = {"error": error, "seconds": round(float(seconds), 1)}
    return found


CASES = {
    case.__name__: case
    for case in (payloads, safetensors, counters, spans, retries, descriptors, mirror, trackers)
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    for name in parser.parse_args().cases or list(CASES):
        if name not in CASES:
            parser.error(f"there is no case {name}; the cases are {', '.join(CASES)}")
        emit("libraries", {"case": name, **CASES[name]()})


if __name__ == "__main__":
    main()
