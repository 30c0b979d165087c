"""Memory of the controller with its journal, and of a rank, stays flat over many operations."""

import asyncio
import gc
from pathlib import Path

import numpy as np
import psutil
import pytest

from skyrl_actors.config.base_models import TinyBase
from skyrl_actors.config.cluster import ClusterConfig, JournalConfig
from skyrl_actors.controller.controller import Controller
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.groups.exactly_once import ExactlyOnce
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.messages.columns import columns_from
from skyrl_actors.messages.example import TARGETS, Example
from skyrl_actors.messages.model import AdamParams, LoraSpec, LossCall, ModelSpec
from skyrl_actors.messages.precondition import OpPrecondition
from skyrl_actors.messages.requests import CreateModel, ForwardBackward, OptimStep
from skyrl_actors.workers.interface import PartCall, RowOutput, WorkerSpec
from skyrl_actors.workers.torch_worker import TorchWorker
from tests.fakes import FakeBackend

OPERATIONS, WARM, TENANTS = 20_000, 6_000, 8
GROWTH_BYTES = 12 * 2**20  # less than one copy of 14,000 operations of 1 KiB each


def rss() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


@pytest.mark.slow
async def test_the_memory_of_the_controller_stays_flat(tmp_path: Path):
    config = ClusterConfig(
        base_model=TinyBase(name="tiny"),
        checkpoint_dir=tmp_path / "c",
        journal=JournalConfig(folder=tmp_path / "journal", snapshot_operations=1000),
    )
    backend = FakeBackend()
    controller = Controller(config, backend, SqlJournal(config.journal, KINDS))
    controller.results.ttl_s = 0.05
    await controller.start()
    session = await controller.create_session()
    tokens = np.ones(256, np.int32)
    columns = columns_from([Example(tokens, {TARGETS: tokens})])

    async def tenant(index: int, first: int, last: int) -> None:
        spec = ModelSpec(
            model_id=f"{session}:train:{index}", base_model="tiny", lora=LoraSpec(rank=2)
        )
        if first == 1:
            await controller.answers.whole(
                await controller.submit(CreateModel(spec=spec, session_id=session)), 30
            )
        for number in range(first, last):
            step = number % 4 == 0
            request = (
                OptimStep(spec.model_id, AdamParams(), number)
                if step
                else ForwardBackward(
                    model_id=spec.model_id,
                    columns=columns,
                    loss=LossCall("cross_entropy", {}),
                    seq_id=number,
                )
            )
            request_id = await controller.submit(request)
            if step:
                assert await controller.answers.whole(request_id, 30) is not None
            backend.calls.clear()

    first = WARM // TENANTS
    await asyncio.gather(*(tenant(i, 1, first) for i in range(TENANTS)))
    after_warm = rss()
    await asyncio.gather(*(tenant(i, first, OPERATIONS // TENANTS) for i in range(TENANTS)))
    grown = rss() - after_warm
    await controller.close()
    # The newest 10,000 sequence numbers of a model are kept on purpose. They still grow here, by
    # about 100 bytes each.
    assert grown < GROWTH_BYTES, (
        f"{grown / 2**20:.1f} MiB more after {OPERATIONS - WARM} operations"
    )


@pytest.mark.slow
def test_the_memory_of_a_rank_stays_flat(random_base: Path):
    worker = TorchWorker(
        WorkerSpec(
            role="policy",
            rank=0,
            world_size=1,
            base_folder=str(random_base),
            dtype="float32",
            device="cpu",
            num_threads=1,
            microbatch_tokens=256,
            collective_timeout_s=30.0,
        )
    )
    worker.setup("127.0.0.1", 0)
    once = ExactlyOnce(worker)
    once.apply(
        1,
        "m",
        OpPrecondition(1),
        "create_model",
        ModelSpec(model_id="m", base_model="tiny", lora=LoraSpec(rank=4)),
    )
    tokens = np.arange(16, dtype=np.int32)
    columns = columns_from([Example(tokens, {TARGETS: tokens})])
    call = PartCall(model_id="m", rows=(0,), columns=columns, loss=LossCall("cross_entropy", {}))
    after_warm = 0
    for number in range(2, 1202, 2):
        (output,) = once.forward_backward(1, [OpPrecondition(number, number - 1)], [call], False)
        assert isinstance(output, RowOutput)
        once.apply(1, "m", OpPrecondition(number + 1, number), "optim_step", "m", AdamParams())
        if number % 100 == 0:
            # A snapshot that is never written.
            once.apply(1, "m", OpPrecondition(None, number + 1), "copy_state", "m")
        if number == 400:
            after_warm = rss()
    assert rss() - after_warm < 8 * 2**20
