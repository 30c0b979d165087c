"""Environment of training ranks: the number of threads and how they wait, and what JAX reads."""

from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.groups import GroupConfig
from skyrl_actors.config.strategies import JaxStrategy

# How often a thread polls for work before it sleeps. A few microseconds keep threads awake between
# the operations of a pass. A longer wait takes cores from ranks that compute at the same time, for
# example a policy and a critic.
BRIEF_SPIN, LONG_SPIN = "500", "5000"


def rank_environment(config: ClusterConfig, group: GroupConfig) -> dict[str, str]:
    """Return the environment variables of a training rank, in addition to those of all actors."""
    ranks = sum(each.num_ranks for each in (config.policy, config.critic) if each)
    own = {
        "OMP_NUM_THREADS": str(group.num_threads),
        "GOMP_SPINCOUNT": LONG_SPIN if ranks == 1 else BRIEF_SPIN,
    }
    if uses_jax(config):
        own["NPROC"] = str(group.num_threads)  # of XLA's thread pools
        if config.placement.device == "cpu":
            own["JAX_PLATFORMS"] = "cpu"
    return own


def uses_jax(config: ClusterConfig) -> bool:
    """Return whether a group computes with JAX."""
    groups = [group for group in (config.policy, config.critic) if group]
    return any(isinstance(group.strategy, JaxStrategy) for group in groups)
