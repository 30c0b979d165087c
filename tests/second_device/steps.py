"""Run a worker's verbs and all phase moves on the second device, and compare with the CPU."""

import gc
import json
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from skyrl_actors.losses import find
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.model import AdamParams, LoraSpec, ModelSpec
from skyrl_actors.transport.device_memory import allocated
from skyrl_actors.workers import torch_worker
from skyrl_actors.workers.base_model import BaseModel
from skyrl_actors.workers.flat import FlatState
from skyrl_actors.workers.interface import MemoryPart, PartCall, RowOutput, WorkerSpec
from skyrl_actors.workers.torch_worker import TorchWorker
from tests.second_device import NAME, NoMixtures
from tests.workers.test_numbers import batch

CASES: dict[str, dict[str, Any]] = {
    "lora": {"lora": LoraSpec(rank=4)},
    "lora-recompute": {"lora": LoraSpec(rank=4), "activations": "recompute"},
    "lora-offload": {"lora": LoraSpec(rank=4), "activations": "offload"},
    "lora-bfloat16": {"lora": LoraSpec(rank=4), "dtype": "bfloat16"},
    "lora-critic": {"lora": LoraSpec(rank=4), "role": "critic"},
    "full": {},
    "full-recompute": {"activations": "recompute"},
    "full-offload": {"activations": "offload"},
    "full-bfloat16": {"dtype": "bfloat16"},
    "full-critic": {"role": "critic"},
    "full-muon": {"optimizer": "muon"},
}
ADAM = AdamParams(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=1.0)
ALL: tuple[MemoryPart, ...] = ("weights", "gradients", "optimizer")


class Run:
    """One worker with two models, whose verbs alternate with the moves of phases."""

    def __init__(self, base: str, kind: str, case: dict[str, Any]):
        case = dict(case)
        lora, optimizer = case.pop("lora", None), case.pop("optimizer", "adamw")
        self.role = case.get("role", "policy")
        self.worker = TorchWorker(
            WorkerSpec(
                rank=0,
                world_size=1,
                base_folder=base,
                device=kind,  # type: ignore[arg-type]
                num_threads=1,
                microbatch_tokens=64,
                collective_timeout_s=60.0,
                max_adapters=1,
                max_rank=4,  # one of two adapters at a time is on the device
                **{"dtype": "float32", "role": "policy", **case},
            )
        )
        self.worker.setup("127.0.0.1", 0)
        self.specs = [
            ModelSpec(
                model_id=name,
                base_model="b",
                role=self.role,
                lora=lora,
                seed=seed,
                optimizer=optimizer,
            )
            for seed, name in enumerate(("a", "b") if lora else ("a",))
        ]
        self.outputs: list[np.ndarray] = []
        self.host_copies: set[tuple[int, ...]] = set()  # addresses of the frozen base
        self.on_host: list[bool] = []  # whether they were pinned
        self.left_bytes = 0  # on the device, in the phase in which engines have it

    def phase(self, *parts: MemoryPart) -> None:
        """Leave on the device only these parts."""
        away = tuple(part for part in ALL if part not in parts)
        if away:
            self.worker.move(away, "host")
        if parts:
            self.worker.move(parts, "device")
        else:
            self.left_bytes = max(self.left_bytes, allocated(self.worker.device))
            base = self.worker.model_factory.base
            assert isinstance(base, BaseModel)
            held = [p.data for p in base.own.values()]
            self.on_host.append(all(t.is_pinned() for t in held))
            self.host_copies.add(tuple(t.data_ptr() for t in held))

    def compute(self, name: str, forward_only: bool = False, **options: float) -> None:
        loss = "ppo_critic" if self.role == "critic" else "importance_sampling"
        extra = ("values", "returns") if self.role == "critic" else ("logprobs", "advantages")
        call = find(loss).checked(options)
        columns: Columns = batch(len(self.outputs), extra=extra)
        part = PartCall(
            model_id=name, rows=tuple(range(columns.num_rows)), columns=columns, loss=call
        )
        (output,) = self.worker.forward_backward((part,), forward_only)
        if not isinstance(output, RowOutput):
            raise output.error
        self.outputs += [output.values, output.elementwise]

    def all_verbs(self, folder: Path) -> dict[str, np.ndarray]:
        options = {"entropy_coef": 0.01, "top_k": 20.0, "temperature": 0.7}
        if self.role == "critic":
            options = {}
        for spec in self.specs:
            self.worker.create_model(spec)
        for round_number in range(2):
            for spec in self.specs:
                name = spec.model_id
                self.phase("weights", "gradients")
                self.compute(name)
                self.phase()  # gradients are pending, and all leave the device
                self.phase("weights", "gradients")
                self.compute(name, forward_only=True)
                self.compute(name, **options)
                self.phase("weights", "gradients", "optimizer")
                norm = self.worker.optim_step(name, ADAM)["skyrl.ai/grad_norm"]
                self.outputs.append(np.asarray(norm))
                self.worker.save_checkpoint(
                    name, str(folder / f"{name}{round_number}"), "training", "m"
                )
                self.phase("weights")
                if self.role == "policy":
                    version = f"{name}@{round_number}"
                    self.worker.export_weights(name, str(folder / version), version, False)
                self.phase()
        name = self.specs[0].model_id
        self.phase("weights", "gradients", "optimizer")
        self.worker.load_checkpoint(name, str(folder / f"{name}0"), True)
        (folder / "snapshot").mkdir()
        handle = self.worker.copy_state(name).handle
        self.worker.write_state(handle, str(folder / "snapshot"))
        self.worker.restore_state(self.specs[0], str(folder / "snapshot"))
        self.compute(name)
        self.worker.optim_step(name, ADAM)
        self.phase()
        self.phase("weights")
        found: dict[str, np.ndarray] = {}
        for spec in self.specs:
            state = self.worker.models[spec.model_id].state
            assert isinstance(state, FlatState)
            found[spec.model_id] = state.weights.float().cpu().numpy()
        return found


def run(base: str, kind: str, case: dict[str, Any]) -> tuple[Run, dict[str, np.ndarray]]:
    with tempfile.TemporaryDirectory() as folder, NoMixtures() if kind == "gpu" else nullcontext():
        torch.manual_seed(0)
        made = Run(base, kind, case)
        return made, made.all_verbs(Path(folder))


def main(base: str, names: list[str]) -> None:
    """Print one line of JSON for each case."""
    torch_worker.DEVICE_TYPES["gpu"] = NAME
    torch.set_num_threads(1)
    for name in names:
        (theirs, wanted), (ours, found) = (run(base, kind, CASES[name]) for kind in ("cpu", "gpu"))
        report = {
            "case": name,
            "device": str(ours.worker.device),
            "outputs": max(map(relative, ours.outputs, theirs.outputs)),
            "first_outputs": max(map(relative, ours.outputs[:2], theirs.outputs[:2])),
            "weights": max(relative(found[key], wanted[key]) for key in wanted),
            "changed": min(float(np.abs(value).max()) for value in found.values()),
            "left_bytes": ours.left_bytes,
            "host_copies": len(ours.host_copies),
            "pinned": all(ours.on_host),
        }
        print(json.dumps(report), flush=True)
        del theirs, wanted, ours, found
        gc.collect()  # the hooks and modules of a network form reference cycles


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """Return |a - b| / |b|; 0 for equal arrays, also of zeros, as a new critic's values are."""
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))
