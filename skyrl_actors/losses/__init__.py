"""Losses by name. Importing this package fills the registry; it loads no array library."""

from skyrl_actors.losses import (
    cispo,
    cross_entropy,
    custom,
    dppo,
    dro,
    gspo,
    importance_sampling,
    ppo,
    ppo_critic,
)
from skyrl_actors.losses.loss import REGISTRY, Loss, check_inputs, find

__all__ = [
    "REGISTRY",
    "Loss",
    "check_inputs",
    "cispo",
    "cross_entropy",
    "custom",
    "dppo",
    "dro",
    "find",
    "gspo",
    "importance_sampling",
    "ppo",
    "ppo_critic",
]
