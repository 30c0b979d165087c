"""Identify the owner of an API key, or of a token that an SDK got for it.

Tokens are JWT (RFC 7519, HS256).
"""

import time
from functools import lru_cache
from pathlib import Path

import jwt

from skyrl_actors.api.archives import secret_of
from skyrl_actors.api.state import ApiState
from skyrl_actors.config.keys import digest_of

VALID_S = 1800
SECRET_FILE = ".token_secret"
ALGORITHM = "HS256"


def owner_of_credential(state: ApiState, credential: str) -> str | None:
    """Return the owner of an API key or token; None if it is unknown, expired or revoked."""
    if credential.count(".") == 2 and credential.startswith("eyJ"):
        owner = _owner_in(state.folders.root, credential)
        return owner if owner in state.owners.values() else None
    return state.owners.get(digest_of(credential))


def token_for(root: Path, owner: str) -> str:
    """Create a token of VALID_S seconds for an owner."""
    now = int(time.time())
    claims = {
        "sub": owner,
        "org_id": "local",
        "email": f"{owner}@localhost",
        "iat": now,
        "exp": now + VALID_S,
    }
    return jwt.encode(claims, _secret(root), ALGORITHM)


@lru_cache
def _secret(root: Path) -> bytes:
    """Return the secret, cached because every request with a token needs it."""
    return secret_of(root, SECRET_FILE)


def _owner_in(root: Path, token: str) -> str | None:
    try:
        return jwt.decode(token, _secret(root), [ALGORITHM], {"require": ["sub", "exp"]})["sub"]
    except jwt.InvalidTokenError:
        return None
