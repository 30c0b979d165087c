"""Ray-native actor cluster for post-training language models by reinforcement learning.

docs/explanation/architecture.md describes the packages.
"""
