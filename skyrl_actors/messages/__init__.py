"""Frozen types that cross a process boundary; errors, ids and paths."""
