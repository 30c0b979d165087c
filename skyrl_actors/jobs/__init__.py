"""Training programs: RL, SFT, DPO and reward models; their environments and run folders."""
