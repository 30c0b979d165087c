"""Refuse an adapter that would train less than its switches name.

An adapter has the terms of `adapter_terms`. A layer can hold weights of other kinds: experts that
transformers computes by other code, unknown projections. A switch is refused when terms cover only
a part of its weights, or none.
"""

import re
from collections.abc import Mapping

from torch import nn

from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.model import LoraSpec
from skyrl_actors.workers.adapter_terms import Switch, Term, chosen, whole_shape

IN_A_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.(.+)$")
MLP_PARTS = ("mlp", "feed_forward", "ffn", "moe", "expert")
LAYERS: tuple[Switch, ...] = ("train_attn", "train_mlp")
# Adapters never train these: routers, convolutions, projections out of a latent vector, and the
# terms of a decay.
ROUTERS = ("gate", "router", "shared_expert_gate")
NEVER = frozenset(
    (
        *ROUTERS,
        *("conv1d", "conv", "q_conv1d", "k_conv1d", "v_conv1d"),
        *("q_b_proj", "kv_b_proj"),
        *("in_proj_ba", "in_proj_a", "in_proj_b", "b_proj", "f_a_proj", "f_b_proj"),
        *("g_a_proj", "g_b_proj", "x_proj", "dt_proj", "A_log"),
    )
)


def check_covered(lora: LoraSpec, module: nn.Module, terms: Mapping[str, Term]) -> None:
    """Raise InvalidRequest for a switch that would train only a part of its weights, or nothing."""
    if not chosen(terms, lora):
        raise InvalidRequest(
            "the LoRA spec trains nothing: set at least one of train_attn, train_mlp, train_unembed"
        )
    frozen = frozen_weights(module, terms)
    for switch in LAYERS:
        if not getattr(lora, switch):
            continue
        if frozen[switch]:
            raise InvalidRequest(
                f"{switch} would leave {', '.join(frozen[switch])} of {type(module).__name__} "
                f"frozen: adapters cannot train these weights; set {switch}=false, or train "
                "the whole model (rank 0)"
            )
        if not any(term.switch == switch for term in terms.values()):
            raise InvalidRequest(
                f"this base model has no linear layers for {switch}; set {switch}=false"
            )


def frozen_weights(module: nn.Module, terms: Mapping[str, Term]) -> dict[Switch, list[str]]:
    """For each switch, return the matrices without a term, by their names within a layer."""
    found: dict[Switch, list[str]] = {"train_attn": [], "train_mlp": []}
    covered = {term.weight for term in terms.values()}
    for name, parameter in module.named_parameters():
        place = IN_A_LAYER.search(name)
        if (
            place is None
            or len(whole_shape(parameter)) < 2
            or name in covered
            or name.endswith("bias")
            or not NEVER.isdisjoint(name.removesuffix(".weight").split(".")[-1:])
        ):
            continue
        inside = place[1].removesuffix(".weight")
        switch: Switch = "train_mlp" if any(part in inside for part in MLP_PARTS) else "train_attn"
        if inside not in found[switch]:
            found[switch].append(inside)
    return found
