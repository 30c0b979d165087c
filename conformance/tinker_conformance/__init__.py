"""Tests of any Tinker server by its URL: calls, numbers, sampling, durability, hostile input."""
