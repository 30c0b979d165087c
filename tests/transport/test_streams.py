"""One delivery for engines of several hosts: one that dies takes no other with it."""

import multiprocessing as mp
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_actors.messages.weights import TensorEntry, WeightManifest, WeightStream
from skyrl_actors.transport import streams

COUNT, SIZE = 24, 20_000
ENTRIES = tuple(
    TensorEntry(f"t{i}", (SIZE,), "float32", i * SIZE * 4, SIZE * 4) for i in range(COUNT)
)


def engine(stream: WeightStream, rank: int, host: str, dies_at: int, told: Any) -> None:
    torch.set_num_threads(1)
    streams.host_id = lambda: host
    last, number = torch.zeros(()), 0
    try:
        for number, (_, tensor) in enumerate(
            streams.received(stream, ENTRIES, rank, torch.device("cpu")), 1
        ):
            if number == dies_at:
                os._exit(9)
            last = tensor[-1].clone()
        told.put((rank, number, float(last)))
    except Exception as error:  # noqa: BLE001  told to the test
        told.put((rank, number, f"{type(error).__name__}: {error}"))


@pytest.mark.parametrize("dies_at", [0, 9])
def test_an_engine_that_dies_in_a_shared_delivery_ends_no_other(dies_at: int, tmp_path: Path):
    """Engine 2 copies from engine 1, which is on the same host."""
    manifest = WeightManifest(
        version="v@1", kind="full", path="/x", num_bytes=COUNT * SIZE * 4, tensors=ENTRIES
    )
    live = torch.arange(COUNT * SIZE, dtype=torch.float32)
    asked = WeightStream("127.0.0.1", 0, 4, "gloo", 400_000, 60.0)
    opened, sender = streams.open_stream(
        manifest, asked, torch.device("cpu"), streams.from_live(ENTRIES, live)
    )
    spawning = mp.get_context("spawn")
    told = spawning.Queue()
    engines = [
        spawning.Process(
            target=engine, args=(opened, rank, host, dies_at if rank == 2 else 0, told)
        )
        for rank, host in ((1, "one"), (2, "one"), (3, "two"))
    ]
    for process in engines:
        process.start()
    found = sorted(told.get(timeout=50) for _ in range(3 if dies_at == 0 else 2))
    whole = (COUNT, float(COUNT * SIZE - 1))
    assert found == [(rank, *whole) for rank in ((1, 2, 3) if dies_at == 0 else (1, 3))]
    sender.join(20)
    assert not sender.is_alive()
    for process in engines:
        process.join(20)
