"""OpenMP of training ranks on a CPU: threads, and how they wait."""

from skyrl_actors.config.cluster import ClusterConfig, GroupConfig

# How often a thread looks for work before it sleeps. Some microseconds of it keep threads awake between the operations of one
# pass; a longer wait takes cores from ranks that compute at the same time, as those of a policy and a critic do.
BRIEF_SPIN, LONG_SPIN = "500", "5000"


def rank_environment(config: ClusterConfig, group: GroupConfig) -> dict[str, str]:
    """Of a training rank, beside what all actors get."""
    ranks = sum(each.num_ranks for each in (config.policy, config.critic) if each)
    return {"OMP_NUM_THREADS": str(group.num_threads), "GOMP_SPINCOUNT": LONG_SPIN if ranks == 1 else BRIEF_SPIN}
