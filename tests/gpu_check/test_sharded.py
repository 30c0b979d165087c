"""The packed forward pass of a network that FSDP2 shards over eight GPUs, with fake tensors.

Collectives are torch's fake ones, which move nothing. Streams and events do nothing.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from skyrl_actors.config.strategies import Fsdp2Strategy
from skyrl_actors.workers import fsdp2, varlen
from skyrl_actors.workers.blocks import Block
from skyrl_actors.workers.network import PassInputs, Segment
from skyrl_actors.workers.rank_groups import shard_groups
from skyrl_actors.workers.tensor_files import InMemory
from tests.gpu_check import NEEDS_CUDA_BUILD
from tests.gpu_check.test_training import MODELS, _adapter, an_h100

pytestmark = NEEDS_CUDA_BUILD
RANKS, TOKENS = 8, 1024
__all__ = ["an_h100"]


class Stream:
    """A stream or an event of a device without a driver."""

    device = torch.device("cuda", 0)

    def __init__(self, *_: Any, **__: Any):
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: Stream()


@pytest.fixture
def without_a_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    cuda = {
        "Stream": Stream,
        "Event": Stream,
        "current_stream": lambda *_: Stream(),
        "stream": lambda *_: contextlib.nullcontext(),
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "synchronize": lambda *_: None,
    }
    for name, stand_in in cuda.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    shard_groups.cache_clear()
    yield
    dist.destroy_process_group()
    shard_groups.cache_clear()


@pytest.fixture
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build networks from fake tensors of the meta device, and read no weights."""
    mesh, shell = fsdp2.DeviceMesh, fsdp2.shell

    def from_group(*given: Any) -> Any:
        with unset_fake_temporarily():
            return mesh.from_group(*given)

    def fake_shell(folder: str, dtype: torch.dtype) -> Any:
        with unset_fake_temporarily():
            module = shell(folder, dtype)
        for part in module.modules():
            for name, given in part._parameters.items():
                if given is not None:
                    made = torch.empty(given.shape, dtype=given.dtype, device="meta")
                    part._parameters[name] = nn.Parameter(made)
            for name, given in part._buffers.items():
                if given is not None:
                    part._buffers[name] = torch.empty(given.shape, dtype=given.dtype)
        return module

    @contextlib.contextmanager
    def no_weights(*_: Any) -> Iterator[InMemory]:
        yield InMemory({})

    monkeypatch.setattr(fsdp2, "DeviceMesh", SimpleNamespace(from_group=from_group))
    monkeypatch.setattr(fsdp2, "shell", fake_shell)
    monkeypatch.setattr(fsdp2, "weights_of", no_weights)
    monkeypatch.setattr(fsdp2.Network, "stored_form", None)  # the names in files, found by numbers


@pytest.mark.usefixtures("without_a_driver", "no_files")
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_sharded_pass_stays_on_the_device(
    name: str, trained: bool, activations: Any, tmp_path: Path
):
    config = MODELS[name]
    config.save_pretrained(tmp_path)
    varlen.row_bounds.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=False):
        network = fsdp2.sharded_network(
            Fsdp2Strategy(),
            shard_groups(RANKS, 60.0),
            str(tmp_path),
            torch.bfloat16,
            torch.device("cuda"),
            activations,
            trained=trained,
        )
        network.same_graph = True
        for parameter in network.whole.parameters():
            local: Any = parameter
            held = local.to_local()
            assert held.device.type == "cuda" and held.numel() * RANKS >= parameter.numel()
            assert held.numel() * RANKS <= parameter.numel() * 1.01 + RANKS * held.shape[-1]
            assert parameter.dtype == (torch.float32 if trained else torch.bfloat16)
        with torch.device("cuda"):
            views = {} if trained else _adapter(network)
            segments = (Segment(TOKENS, views, 1.0),)
            integers = torch.zeros(TOKENS, dtype=torch.int64)
            inputs = PassInputs(
                tokens=integers,
                positions=integers,
                blocks=(Block(0, 2, TOKENS // 4), Block(TOKENS // 2, 1, TOKENS // 2)),
                segments=segments,
                targets=integers,
                counted=None,
            )
            with network.in_use(segments):
                outputs = [one for one in network.predict(inputs) if one is not None]
    assert {(one.device.type, one.dtype) for one in outputs} == {("cuda", torch.float32)}
    assert all(one.shape == (TOKENS,) for one in outputs)


@pytest.mark.usefixtures("without_a_driver", "no_files")
def test_shards_in_host_memory_are_gathered_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """NCCL gathers no host memory. The shards are there while engines on the same GPUs sample."""
    next(iter(MODELS.values())).save_pretrained(tmp_path)
    device, host, gathered = torch.device("cuda"), torch.device("cpu"), list[torch.device]()
    gather = DTensor.full_tensor

    def full_tensor(shards: DTensor) -> torch.Tensor:
        gathered.append(shards.to_local().device)
        return gather(shards)

    monkeypatch.setattr(DTensor, "full_tensor", full_tensor)
    groups = shard_groups(RANKS, 60.0)
    with FakeTensorMode(allow_non_fake_inputs=False):
        network = fsdp2.sharded_network(
            Fsdp2Strategy(),
            groups,
            str(tmp_path),
            torch.bfloat16,
            device,
            "keep",
            trained=True,
        )
        state = fsdp2.Fsdp2State(network, Fsdp2Strategy(), groups)
        state.move("weights", host)
        assert {p.to_local().device.type for p in state.parameters.values()} == {"cpu"}
        found = dict(state.tensors("weights", torch.bfloat16, device, everywhere=True))
    assert {name: tuple(whole.shape) for name, whole in found.items() if whole is not None} == dict(
        state.shapes
    )
    assert {d.type for d in gathered} == {"cuda"} and len(gathered) == len(state.shapes)
