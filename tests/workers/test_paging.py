"""Adapters leave the device while idle and return when used, with the same numbers bit by bit."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from skyrl_actors.config.strategies import JaxStrategy, ReplicaStrategy
from skyrl_actors.messages.model import AdamParams, LoraSpec, ModelSpec, OptimizerName, Role
from skyrl_actors.workers import adamw8bit, flat, optimizers
from skyrl_actors.workers.batches import BatchRunner
from skyrl_actors.workers.flat import FlatState
from skyrl_actors.workers.interface import RowOutput, WorkerSpec
from skyrl_actors.workers.torch_worker import TorchWorker
from tests.workers.references import batch, inputs_of
from tests.workers.test_many_tenants import part, state
from tests.workers.tiny_models import make

NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record each move, and overwrite its source, as if this CPU had two memories."""
    done: list[int] = []

    def moved(tensor: Tensor, device: torch.device) -> Tensor:
        copy = tensor.clone()
        with torch.no_grad():
            tensor.fill_(float("nan") if tensor.is_floating_point() else 77)
        done.append(tensor.nbytes)
        return copy

    for module in (flat, optimizers, adamw8bit):
        monkeypatch.setattr(module, "placed", moved)
    return done


SPEC = WorkerSpec(
    role="policy",
    rank=0,
    world_size=1,
    base_folder="",
    dtype="float32",
    device="cpu",
    num_threads=1,
    microbatch_tokens=64,
    collective_timeout_s=60.0,
    max_rank=4,
)


def worker_for(base: Path, places: int, role: Role = "policy") -> TorchWorker:
    worker = TorchWorker(replace(SPEC, role=role, base_folder=str(base), max_adapters=places))
    worker.setup("127.0.0.1", 0)
    return worker


def on_device(worker: TorchWorker) -> list[str]:
    pager = worker._pager  # type: ignore[reportPrivateUsage]
    return [name for name in worker.models if pager.is_on_device(name)]


def computed(
    worker: TorchWorker, name: str, seed: int, loss: str, forward_only: bool = False
) -> RowOutput:
    call = part(name, batch(seed, (9, 14), inputs_of(loss), targets=loss != "ppo_critic"), loss, {})
    (output,) = worker.forward_backward((call,), forward_only)
    assert isinstance(output, RowOutput)
    return output


def alternated(worker: TorchWorker, specs: list[ModelSpec], loss: str) -> list[Any]:
    """Alternate two tenants, with gradients of one pending while the other trains."""
    found: list[Any] = []
    for spec in specs:
        worker.create_model(spec)
    for step in range(4):
        for accumulated in range(2):
            found += [
                computed(worker, spec.model_id, 10 * step + accumulated + i, loss)
                for i, spec in enumerate(specs)
            ]
        found += [computed(worker, spec.model_id, 99, loss, forward_only=True) for spec in specs]
        for i, spec in enumerate(specs):
            found.append(
                worker.optim_step(
                    spec.model_id,
                    AdamParams(learning_rate=1e-2 * (i + 1), weight_decay=0.1, grad_clip_norm=1.0),
                )
            )
    for i, spec in enumerate(specs):
        found.append(computed(worker, spec.model_id, 50 + i, loss))  # remains pending
    return found


def whole(worker: TorchWorker, name: str) -> dict[str, Tensor | None]:
    found = state(worker, name)
    return {"weights": found.weights, "gradients": found.gradients, **found.optimizer_tensors()}


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, RowOutput):
        np.testing.assert_array_equal(one.values, other.values)
        np.testing.assert_array_equal(one.elementwise, other.elementwise)
        assert one.sums == other.sums
    else:
        assert one == other


@pytest.mark.parametrize(
    ("role", "optimizer", "loss"),
    [
        ("policy", "adamw", "ppo"),
        ("policy", "muon", "cross_entropy"),
        ("critic", "adamw", "ppo_critic"),
    ],
)
def test_paging_two_alternating_tenants_changes_no_bit(
    base: Path, moves: list[int], role: Any, optimizer: OptimizerName, loss: str
):
    specs = [
        ModelSpec(
            model_id=name,
            base_model="tiny",
            role=role,
            lora=LoraSpec(rank=4 - i),
            seed=i,
            optimizer=optimizer,
        )
        for i, name in enumerate(NAMES[:2])
    ]
    tight, roomy = worker_for(base, 1, role), worker_for(base, 2, role)
    wide = alternated(roomy, specs, loss)
    assert not moves
    narrow = alternated(tight, specs, loss)
    assert len(moves) > 50 and on_device(tight) == ["b"]
    for one, other in zip(narrow, wide, strict=True):
        assert_equal(one, other)
    for spec in specs:
        a, b = whole(tight, spec.model_id), whole(roomy, spec.model_id)
        assert a.keys() == b.keys() and "exp_avg" in a and a["gradients"] is not None
        for name, tensor in a.items():
            assert tensor is not None
            assert torch.equal(tensor, b[name]), (spec.model_id, name)  # type: ignore[arg-type]


def test_an_idle_adapter_is_snapshotted_saved_and_loaded_in_host_memory(
    base: Path, moves: list[int], tmp_path: Path
):
    """Reads do not bring it back to the device."""
    specs = [
        ModelSpec(model_id=name, base_model="tiny", lora=LoraSpec(rank=4), seed=i)
        for i, name in enumerate(NAMES[:2])
    ]
    tight, roomy = worker_for(base, 1), worker_for(base, 2)
    for worker, name in ((tight, "tight"), (roomy, "roomy")):
        alternated(worker, specs, "cross_entropy")
        folder = tmp_path / name
        (folder / "state").mkdir(parents=True)
        worker.write_state(worker.copy_state("a").handle, str(folder / "state"))
        worker.save_checkpoint("a", str(folder / "saved"), "training", "mark")
        worker.export_weights("a", str(folder / "export"), "a@1", checksums=True)
    assert on_device(tight) == ["b"]
    for file in sorted((tmp_path / "roomy").rglob("*.safetensors")):
        same = tmp_path / "tight" / file.relative_to(tmp_path / "roomy")
        assert same.read_bytes() == file.read_bytes(), file.name
    for worker, name in ((tight, "tight"), (roomy, "roomy")):
        worker.restore_state(specs[0], str(tmp_path / name / "state"))
        computed(worker, "b", 7, "cross_entropy")
        worker.load_checkpoint("a", str(tmp_path / name / "saved"), True)
        worker.optim_step("a", AdamParams(learning_rate=1e-2))
    for name, tensor in whole(tight, "a").items():
        other = whole(roomy, "a")[name]
        assert tensor is not None and other is not None and torch.equal(tensor, other), name


def test_the_least_recently_used_adapter_leaves_and_a_deleted_one_frees_its_place(
    base: Path, moves: list[int]
):
    worker = worker_for(base, 2)
    for i, name in enumerate(NAMES):
        worker.create_model(
            ModelSpec(model_id=name, base_model="tiny", lora=LoraSpec(rank=4), seed=i)
        )
    assert on_device(worker) == ["b", "c"]
    computed(worker, "b", 1, "cross_entropy")
    computed(worker, "a", 1, "cross_entropy")
    assert on_device(worker) == ["a", "b"]
    before = len(moves)
    worker.delete_model("b")
    worker.optim_step("a", AdamParams())
    assert on_device(worker) == ["a"] and len(moves) == before
    computed(worker, "c", 1, "cross_entropy")
    assert on_device(worker) == ["a", "c"]


def test_a_call_of_more_adapters_than_fit_runs_in_several_batches(base: Path, moves: list[int]):
    tight, roomy = worker_for(base, 2), worker_for(base, 3)
    outputs = []
    for worker in (tight, roomy):
        for i, name in enumerate(NAMES):
            worker.create_model(
                ModelSpec(model_id=name, base_model="tiny", lora=LoraSpec(rank=4), seed=i)
            )
        calls = tuple(
            part(name, batch(i, (9, 5)), "cross_entropy", {}) for i, name in enumerate(NAMES)
        )
        outputs.append(worker.forward_backward(calls, False))
    for one, other in zip(*outputs, strict=True):
        np.testing.assert_allclose(one.values, other.values, atol=1e-5)
    for name in NAMES:
        torch.testing.assert_close(
            state(tight, name).gradients, state(roomy, name).gradients, rtol=1e-4, atol=1e-6
        )


def tensors_of(held: FlatState) -> list[Tensor]:
    views = [t for view in held.views.values() for t in (view.data, view.grad) if t is not None]
    return [
        t
        for t in (held.weights, held.gradients, *held.optimizer_tensors().values(), *views)
        if t is not None
    ]


def test_adapters_of_lower_ranks_share_the_places_of_the_largest(
    base: Path, moves: list[int], monkeypatch: pytest.MonkeyPatch
):
    worker = worker_for(base, 2)
    ranks = {"a": 4, "b": 2, "c": 2}
    for i, (name, rank) in enumerate(ranks.items()):
        worker.create_model(
            ModelSpec(model_id=name, base_model="tiny", lora=LoraSpec(rank=rank), seed=i)
        )
    assert on_device(worker) == ["a", "b", "c"]
    computed(worker, "a", 1, "cross_entropy")
    worker.create_model(ModelSpec(model_id="d", base_model="tiny", lora=LoraSpec(rank=1)))
    assert on_device(worker) == ["a", "c", "d"], "b was used longest ago, and enough room is free"

    sizes: list[list[str]] = []
    run = BatchRunner._run_batch  # type: ignore[reportPrivateUsage]

    def seen(self: BatchRunner, parts: Any, forward_only: bool) -> Any:
        sizes.append([part.model.spec.model_id for part in parts])
        return run(self, parts, forward_only)

    monkeypatch.setattr(BatchRunner, "_run_batch", seen)
    inputs = inputs_of("cross_entropy")
    calls = [part(name, batch(1, (9,), inputs), "cross_entropy", {}) for name in "dabc"]
    outputs = worker.forward_backward(tuple(calls), True)
    assert all(isinstance(one, RowOutput) for one in outputs)
    assert sizes == [["d", "a", "b"], ["c"]]
    assert on_device(worker) == ["a", "b", "c"]


def test_jax_gives_every_adapter_a_whole_place():
    """It pads the adapters of a pass to one rank, and keeps as many as there are places."""
    parts: list[Any] = [
        SimpleNamespace(
            model=SimpleNamespace(
                spec=ModelSpec(model_id=name, base_model="tiny", lora=LoraSpec(rank=1))
            )
        )
        for name in NAMES
    ]
    strategies: tuple[Any, ...] = (ReplicaStrategy(), JaxStrategy())
    for strategy, sizes in zip(strategies, ([3], [2, 1]), strict=True):
        spec: Any = replace(SPEC, max_adapters=2, max_rank=4, strategy=strategy)
        none: Any = None
        runner = BatchRunner(spec, none, none, none)
        fitting = runner._fitting(parts)  # type: ignore[reportPrivateUsage]
        assert [len(batch) for batch in fitting] == sizes


def test_an_idle_adapter_leaves_nothing_on_the_device(base: Path, moves: list[int]):
    worker = worker_for(base, 1)
    worker.create_model(ModelSpec(model_id="a", base_model="tiny", lora=LoraSpec(rank=4)))
    computed(worker, "a", 1, "cross_entropy")
    worker.optim_step("a", AdamParams(learning_rate=1e-2))
    computed(worker, "a", 2, "cross_entropy")
    device = tensors_of(state(worker, "a"))  # kept, so that no new tensor reuses their memory
    worker.create_model(ModelSpec(model_id="b", base_model="tiny", lora=LoraSpec(rank=4)))
    host = tensors_of(state(worker, "a"))
    assert len(host) == len(device) > 10
    assert not {t.untyped_storage().data_ptr() for t in host} & {
        t.untyped_storage().data_ptr() for t in device
    }


def test_an_idle_adapter_without_pending_gradients_has_no_gradient_vector(base: Path):
    worker = worker_for(base, 1)
    worker.create_model(ModelSpec(model_id="a", base_model="tiny", lora=LoraSpec(rank=4)))
    computed(worker, "a", 1, "cross_entropy")
    worker.optim_step("a", AdamParams(learning_rate=1e-2))
    assert state(worker, "a").gradients is not None
    worker.create_model(ModelSpec(model_id="b", base_model="tiny", lora=LoraSpec(rank=4)))
    assert state(worker, "a").gradients is None
    computed(worker, "a", 1, "cross_entropy")
    assert state(worker, "a").gradients is not None


def test_a_returning_adapter_brings_only_the_parts_of_the_phase(
    base: Path, monkeypatch: pytest.MonkeyPatch
):
    worker = worker_for(base, 1)
    for i, name in enumerate(NAMES[:2]):
        worker.create_model(
            ModelSpec(model_id=name, base_model="tiny", lora=LoraSpec(rank=4), seed=i)
        )
        computed(worker, name, 1, "cross_entropy")
        worker.optim_step(name, AdamParams(learning_rate=1e-2))
        computed(worker, name, 1, "cross_entropy")
    worker.move(("optimizer",), "host")
    returned: list[str] = []
    monkeypatch.setattr(state(worker, "a"), "move", lambda what, device: returned.append(what))
    computed(worker, "a", 2, "cross_entropy")
    assert returned == ["weights", "gradients"]
