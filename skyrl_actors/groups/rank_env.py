"""OpenMP environment of training ranks on CPUs: the number of threads, and how they wait."""

from skyrl_actors.config.cluster import ClusterConfig, GroupConfig

# How often a thread polls for work before it sleeps. A few microseconds keep threads awake between
# the operations of a pass. A longer wait takes cores from ranks that compute at the same time, for
# example a policy and a critic.
BRIEF_SPIN, LONG_SPIN = "500", "5000"


def rank_environment(config: ClusterConfig, group: GroupConfig) -> dict[str, str]:
    """Return the environment variables of a training rank, in addition to those of all actors."""
    ranks = sum(each.num_ranks for each in (config.policy, config.critic) if each)
    return {
        "OMP_NUM_THREADS": str(group.num_threads),
        "GOMP_SPINCOUNT": LONG_SPIN if ranks == 1 else BRIEF_SPIN,
    }
