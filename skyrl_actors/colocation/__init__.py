"""Phases of devices that policy, critic and engines share, and the locks that change them."""
