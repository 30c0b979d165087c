"""What a full fine-tune does not train, though the files of its family have it."""

from collections.abc import Set

import torch
from torch import Tensor

from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.workers.adapter_terms import TOWER
from skyrl_actors.workers.buffers import stored_buffers
from skyrl_actors.workers.models import TrainedModel
from skyrl_actors.workers.published_names import Published
from skyrl_actors.workers.tensor_files import TensorFiles, whole


def frozen_weights(model: TrainedModel) -> dict[str, Tensor]:
    """Return what this full fine-tune does not train, but its files have: constants and a tower."""
    network = model.network
    tower = {} if model.trains_tower else network.tower_weights
    return stored_buffers(network.module) | tower


def frozen_in(files: TensorFiles, model: TrainedModel) -> Set[str]:
    """Return the names of frozen tensors in these files.

    Raises InvalidRequest for one that differs from the base model's, because it would be dropped.
    """
    frozen, form = frozen_weights(model), model.network.stored_form
    shapes = {name: tuple(tensor.shape) for name, tensor in frozen.items()}
    found = Published(files, form.of_weights(shapes), shapes)
    for name in found.shapes:
        if not torch.equal(whole(found, name).to(frozen[name]), frozen[name]):
            advice = f"; set {model.spec.role}.train_tower=true" if name.startswith(TOWER) else ""
            raise InvalidRequest(
                f"{name} of the checkpoint differs from the base model's, and is not trained "
                f"here{advice}"
            )
    return found.read | form.stored_shapes(shapes).keys() | shapes.keys()
