"""Every config key with its default and its checks."""
