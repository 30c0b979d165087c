"""One stream to the workers of several engines, over gloo, with threads as workers."""

import os
import threading
from pathlib import Path

import pytest
import torch

from skyrl_actors.messages.errors import InternalError
from skyrl_actors.messages.weights import TensorEntry, WeightManifest, WeightStream
from skyrl_actors.transport import streams

CPU, BUCKET = torch.device("cpu"), 64


def manifest_of(folder: Path) -> tuple[WeightManifest, torch.Tensor]:
    weights = torch.arange(96, dtype=torch.float32)
    path = folder / "m@1"
    path.write_bytes(weights.numpy().tobytes())
    entries = tuple(TensorEntry(f"t{i}", (4, 3), "float32", i * 48, 48) for i in range(8))
    manifest = WeightManifest(
        version="m@1", kind="full", path=str(path), num_bytes=384, tensors=entries
    )
    return manifest, weights


def received(stream: WeightStream, manifest: WeightManifest, rank: int, into: dict) -> None:
    try:
        found = streams.received(stream, list(manifest.tensors), rank, CPU)
        into[rank] = torch.cat([tensor.reshape(-1).clone() for _, tensor in found])
    except InternalError as error:
        into[rank] = error


def sent(folder: Path, world_size: int, came: list[int], timeout_s: float = 30.0) -> tuple:
    """Send a version, and return what it read, the weights, and what each worker got."""
    manifest, weights = manifest_of(folder)
    taken: list[range] = []
    take = streams.from_file(manifest)

    def counted(wanted: range) -> torch.Tensor:
        taken.append(wanted)
        return take(wanted)

    asked = WeightStream("127.0.0.1", 0, world_size, "gloo", BUCKET, timeout_s, checksums=True)
    stream, sender = streams.open_stream(manifest, asked, CPU, counted)
    got: dict = {}
    workers = [
        threading.Thread(target=received, args=(stream, manifest, rank, got), name=str(rank))
        for rank in came
    ]
    for worker in workers:
        worker.start()
    for worker in (*workers, sender):
        worker.join(60)
        assert not worker.is_alive()
    return taken, weights, got


@pytest.mark.parametrize("workers", [1, 4, 8])
def test_the_sender_reads_once_for_all_workers(tmp_path: Path, workers: int):
    taken, weights, got = sent(tmp_path, 1 + workers, list(range(1, 1 + workers)))
    assert taken == [range(i, i + 1) for i in range(8)]
    assert sorted(got) == list(range(1, 1 + workers))
    assert all(torch.equal(got[rank], weights) for rank in got)


def test_one_worker_of_each_host_takes_part_in_the_broadcast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Six workers on three hosts, two of which have one worker only."""
    hosts = {"1": "a", "2": "b", "3": "b", "4": "c", "5": "b", "6": "b"}
    joined: list[int] = []
    group = streams._group

    def host_id() -> str:
        return hosts[threading.current_thread().name]

    def counted(store, stream, rank, world_size, address):
        joined.append(rank)
        assert world_size == 4
        return group(store, stream, rank, world_size, address)

    monkeypatch.setattr(streams, "host_id", host_id)
    monkeypatch.setattr(streams, "_group", counted)
    taken, weights, got = sent(tmp_path, 7, [1, 2, 3, 4, 5, 6])
    assert sorted(joined) == [0, 1, 2, 3] and len(taken) == 8
    assert sorted(got) == [1, 2, 3, 4, 5, 6]
    assert all(torch.equal(got[rank], weights) for rank in got)


def test_nothing_is_left_open_when_a_load_fails(tmp_path: Path):
    """The first worker of a host ends after three buckets."""
    manifest, _ = manifest_of(tmp_path)
    asked = WeightStream("127.0.0.1", 0, 3, "gloo", BUCKET, 2.0)
    stream, sender = streams.open_stream(manifest, asked, CPU, streams.from_file(manifest))
    before = open_files()

    def fail() -> None:
        found = streams.received(stream, list(manifest.tensors), 1, CPU)
        for _ in range(3):
            next(found)
        found.close()

    got: dict = {}
    second = threading.Thread(target=received, args=(stream, manifest, 2, got))
    first = threading.Thread(target=fail)
    for worker in (first, second):
        worker.start()
    for worker in (first, second, sender):
        worker.join(30)
        assert not worker.is_alive()
    assert isinstance(got[2], InternalError)
    assert [name for name in open_files() if "memfd" in name] == [
        name for name in before if "memfd" in name
    ]


def open_files() -> list[str]:
    return [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()]


def test_a_worker_that_does_not_come_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(streams, "JOIN_S", 0.5)
    _, weights, got = sent(tmp_path, 5, [1, 2, 4])
    assert sorted(got) == [1, 2, 4] and all(torch.equal(got[rank], weights) for rank in got)


def test_without_a_worker_the_stream_ends(tmp_path: Path):
    taken, _, got = sent(tmp_path, 3, [], timeout_s=0.5)
    assert taken == [] and got == {}


def test_a_worker_that_comes_too_late_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "JOIN_S", 0.3)
    manifest, weights = manifest_of(tmp_path)
    asked = WeightStream("127.0.0.1", 0, 3, "gloo", BUCKET, 20.0)
    began, go = threading.Event(), threading.Event()
    take = streams.from_file(manifest)

    def slow(wanted: range) -> torch.Tensor:
        began.set()
        go.wait(20)
        return take(wanted)

    stream, sender = streams.open_stream(manifest, asked, CPU, slow)
    got: dict = {}
    first = threading.Thread(target=received, args=(stream, manifest, 1, got))
    first.start()
    assert began.wait(20)
    received(stream, manifest, 2, got)
    go.set()
    first.join(20)
    sender.join(20)
    assert torch.equal(got[1], weights)
    assert "the stream began before this worker came" in str(got[2])
