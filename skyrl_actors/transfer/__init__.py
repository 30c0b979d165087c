"""Bring versions of weights from trainers to engines."""
