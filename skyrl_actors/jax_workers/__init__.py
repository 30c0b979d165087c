"""Training ranks whose passes are compiled by JAX, for TPUs, GPUs and CPUs."""
