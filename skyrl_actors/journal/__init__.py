"""Durable requests, answers and snapshots, with group commit and retention."""
