"""Derive the seeds of random draws from names (pure)."""

import hashlib
from dataclasses import replace

from skyrl_actors.messages.requests import Sample

SEEDS = 2**63  # vLLM accepts 0 to 2^63 - 1


def derived_seed(*name: str | int, draws: int = 1) -> int:
    """Hash the whole name. The same name gives the same seed.

    The next `draws` seeds from this one on are valid too.
    """
    content = "\0".join(map(str, name)).encode()
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "big") % (SEEDS - draws + 1)


def seeded(request: Sample, request_id: str) -> Sample:
    """Derive a missing seed from the request id, so that a retry gives the same tokens."""
    params = request.params
    if params.seed is not None:
        return request
    seed = derived_seed(request_id, draws=params.num_samples)
    return replace(request, params=replace(params, seed=seed))
