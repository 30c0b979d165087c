"""Durable files, private folders, and the remote mirror of checkpoints."""
