"""Find the weights that the switches of a LoRA spec would leave frozen.

An adapter adds low-rank terms to linear layers that the trainer knows by name. A layer can hold
other weights: fused experts, projections of latent attention, state-space mixers. A switch is
refused when adapters cover only a part of its weights, so that no adapter trains less than
requested.
"""

import re
from collections.abc import Mapping

from torch import nn

from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.model import LoraSpec

IN_A_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.(.+)$")
MLP_PARTS = ("mlp", "feed_forward", "ffn", "moe", "expert")
ROUTERS = ("gate", "router", "shared_expert_gate")  # adapters never train them


def check_covered(lora: LoraSpec, module: nn.Module, linears: Mapping[str, nn.Linear]) -> None:
    """Raise InvalidRequest for a switch that would train only a part of its weights.

    `linears` are the layers that can have an adapter.
    """
    frozen = frozen_weights(module, linears)
    for switch, asked in (("train_attn", lora.train_attn), ("train_mlp", lora.train_mlp)):
        if asked and frozen[switch]:
            raise InvalidRequest(
                f"{switch} would leave {', '.join(frozen[switch])} of {type(module).__name__} "
                f"frozen: adapters cannot train these weights; set {switch}=false, or train "
                "the whole model (rank 0)"
            )


def frozen_weights(module: nn.Module, linears: Mapping[str, nn.Linear]) -> dict[str, list[str]]:
    """For each switch, return the matrices without an adapter, by their names within a layer."""
    found: dict[str, list[str]] = {"train_attn": [], "train_mlp": []}
    for name, parameter in module.named_parameters():
        owner = name.rpartition(".")[0]
        place = IN_A_LAYER.search(name)
        # `ds_shape` is the whole shape where a rank holds only a part.
        shape = getattr(parameter, "ds_shape", parameter.shape)
        if (
            place is None
            or len(shape) < 2
            or owner in linears
            or owner.rpartition(".")[2] in ROUTERS
        ):
            continue
        inside = place[1].removesuffix(".weight")
        switch = "train_mlp" if any(part in inside for part in MLP_PARTS) else "train_attn"
        if inside not in found[switch]:
            found[switch].append(inside)
    return found
