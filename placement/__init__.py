"""Decide which actor gets which device, and whether its memory suffices."""
