"""The whole state of a model, copied aside in one moment and written later: weights, moments, pending gradients.

Weights and moments are alike on all ranks, so rank 0 writes them. Gradients wait for their all-reduce: each rank writes
its own share, and with the same number of ranks each gets back its own. Nothing draws random numbers after a model's
creation (its seed is in the spec; samples carry theirs), so there is no generator's state to keep.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from skyrl_actors.messages.model import ModelSpec
from skyrl_actors.workers.flat import FlatState
from skyrl_actors.workers.models import TrainedModel

STATE_FILE = "state.safetensors"
SPEC_FILE = "model_spec.json"


@dataclass
class StateCopy:
    spec: ModelSpec
    tensors: dict[str, Tensor]  # weights [P], and after the first step exp_avg [P], exp_avg_sq [P], step []
    gradients: Tensor | None  # [P], None when nothing is pending

    @staticmethod
    def of(model: TrainedModel) -> "StateCopy":
        state = model.state
        tensors = {"weights": state.weights, **state.optimizer_tensors()}
        pending = state.gradients if state.gradients is not None and bool(state.gradients.any()) else None
        copies = {name: _on_host(tensor) for name, tensor in tensors.items()}
        return StateCopy(model.spec, copies, None if pending is None else _on_host(pending))

    def write(self, folder: Path, rank: int, world_size: int) -> None:
        if rank == 0:
            save_file(self.tensors, folder / STATE_FILE)
            (folder / SPEC_FILE).write_text(json.dumps(asdict(self.spec), indent=2))
        if self.gradients is not None:
            save_file({"gradients": self.gradients}, folder / f"gradients-{rank}-of-{world_size}.safetensors")


def load(state: FlatState, folder: Path, rank: int, world_size: int) -> None:
    tensors = load_file(folder / STATE_FILE)
    with torch.no_grad():
        state.weights.copy_(tensors.pop("weights"))
    state.load_optimizer(tensors)
    shares = sorted(folder.glob("gradients-*.safetensors"))
    if not shares:
        return
    own = folder / f"gradients-{rank}-of-{world_size}.safetensors"
    if shares[0].name.endswith(f"-of-{world_size}.safetensors"):
        mine = [own] if own.exists() else []
    else:  # another number of ranks: the sum is what counts, and rank 0 holds it
        mine = shares if rank == 0 else []
    gradients = state.ensure_gradients()
    with torch.no_grad():
        for share in mine:
            gradients.add_(load_file(share)["gradients"].to(gradients.device))


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
