"""The ranks of policy or critic as one object: restart them, and apply each operation once."""
