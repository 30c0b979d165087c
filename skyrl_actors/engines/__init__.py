"""Sampling: vLLM engines, routing between them, their health, and weight updates inside vLLM."""
