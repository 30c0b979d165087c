"""What one rank computes: packed passes, optimizers, checkpoints and sharding strategies."""
