"""Which weights a LoRA's switches would leave frozen, so that no adapter trains less than it was asked for.

An adapter is low-rank terms on linear layers that the trainer knows by name. A layer may hold other weights: fused experts,
projections of latent attention, state-space mixers. A switch whose weights are known in part only is refused.
"""

import re
from collections.abc import Mapping

from torch import nn

from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.model import LoraSpec

IN_A_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.(.+)$")
MLP_PARTS = ("mlp", "feed_forward", "ffn", "moe", "expert")
ROUTERS = ("gate", "router", "shared_expert_gate")  # no adapter is meant for them


def check_covered(lora: LoraSpec, module: nn.Module, linears: Mapping[str, nn.Linear]) -> None:
    """Raise InvalidRequest for a switch that would train a part of what it names. `linears`: layers that take an adapter."""
    frozen = frozen_weights(module, linears)
    for switch, asked in (("train_attn", lora.train_attn), ("train_mlp", lora.train_mlp)):
        if asked and frozen[switch]:
            raise InvalidRequest(
                f"{switch} would leave {', '.join(frozen[switch])} of {type(module).__name__} frozen: adapters on these are "
                f"not served; set {switch}=false, or train the whole model (rank 0)"
            )


def frozen_weights(module: nn.Module, linears: Mapping[str, nn.Linear]) -> dict[str, list[str]]:
    """For each switch, the matrices of the layers that no adapter reaches, by their names within a layer."""
    found: dict[str, list[str]] = {"train_attn": [], "train_mlp": []}
    for name, parameter in module.named_parameters():
        owner = name.rpartition(".")[0]
        place = IN_A_LAYER.search(name)
        shape = getattr(parameter, "ds_shape", parameter.shape)  # of the whole, where a rank holds a part
        if place is None or len(shape) < 2 or owner in linears or owner.rpartition(".")[2] in ROUTERS:
            continue
        inside = place[1].removesuffix(".weight")
        switch = "train_mlp" if any(part in inside for part in MLP_PARTS) else "train_attn"
        if inside not in found[switch]:
            found[switch].append(inside)
    return found
