"""The command line, and the process that supervises HAProxy."""
