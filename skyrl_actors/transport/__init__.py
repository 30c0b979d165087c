"""Calls over an authenticated socket, bounded frames, weight streams, shared device memory."""
