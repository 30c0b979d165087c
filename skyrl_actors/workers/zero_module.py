"""Modules without weights for DeepSpeed, which partitions parameters as they are created."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.workers.attention import ATTENTION
from skyrl_actors.workers.meta_model import dense, shell
from skyrl_actors.workers.mixers import mixers_of


def module_in(shards: AbstractContextManager[Any], folder: str, dtype: torch.dtype) -> Any:
    """Create the modules of a base model in DeepSpeed's context. Their weights are not set."""
    config = dense(AutoConfig.from_pretrained(folder))
    # The context changes the classes that are imported in it for good.
    _ = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # Some models cannot initialize weights that are partitioned.
    with no_init_weights(), shards:
        module: Any = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=ATTENTION
        )
        module.tie_weights()
    _take_constants(module, shell(folder, dtype))
    return module


def _take_constants(module: nn.Module, source: nn.Module) -> None:
    """Use the buffers and other constants of a module that was made outside the context.

    The context makes all tensors in the dtype of the weights, so rotary frequencies are rounded.
    """
    for name, part in source.named_modules():
        own = module.get_submodule(name)
        own._buffers.update(part._buffers)
        own.__dict__.update(
            {key: v for key, v in vars(part).items() if isinstance(v, torch.Tensor)}
        )


def check_can_be_partitioned(module: nn.Module) -> None:
    """Raise ConfigError if ranks would gather the parameters of a layer unequally often.

    A rank calls what is inside a layer with a state once for each of its blocks of rows. Each call
    gathers weights from all ranks, and these have other numbers of blocks.
    """
    if mixers_of(module):
        raise ConfigError(
            f"strategy deepspeed stage 3 cannot train {type(module).__name__}, which has layers "
            "with a state; use fsdp2, or deepspeed stage 1 or 2"
        )


def norm_before(optimizer: Any) -> float:
    """Return the norm of the gradients that DeepSpeed is about to apply, if it must be checked.

    Stage 3 computes it in float64 and makes any step. Others refuse what float32 cannot square.
    """
    if not isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return 0.0
    return float(torch.linalg.vector_norm(torch.stack(optimizer._get_norm_groups())))
