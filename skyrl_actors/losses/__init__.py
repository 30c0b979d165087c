"""Losses by name. Importing this package fills the registry; it loads no array library."""

from skyrl_actors.losses import cross_entropy, importance_sampling, ppo, ppo_critic
from skyrl_actors.losses.base import REGISTRY, Loss, check_inputs, find

__all__ = ["REGISTRY", "Loss", "check_inputs", "cross_entropy", "find", "importance_sampling", "ppo", "ppo_critic"]
