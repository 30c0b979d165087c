"""Identify the owner of an API key, or of a token that an SDK got for it.

Tokens are JWT (RFC 7519, HS256).
"""

import time
from functools import lru_cache
from pathlib import Path

import jwt

from skyrl_actors.api.archives import secret_of
from skyrl_actors.api.credentials import Grant
from skyrl_actors.api.state import ApiState

VALID_S = 1800
SECRET_FILE = ".token_secret"
ALGORITHM = "HS256"
CLAIMS = ["sub", "role", "key", "exp"]


async def grant_of_credential(state: ApiState, credential: str) -> Grant | None:
    """Return the grant of an API key or token; None if it is unknown, expired or revoked.

    A token is accepted as long as the key that it was made for, also over renewals.
    """
    if credential.count(".") == 2 and credential.startswith("eyJ"):
        grant = _grant_in(state.folders.root, credential)
        if grant is None or not await state.credentials.is_granted(grant):
            return None
        return grant
    return await state.credentials.grant(credential)


def token_for(root: Path, grant: Grant) -> str:
    """Create a token of VALID_S seconds for a key."""
    now = int(time.time())
    owner = grant.owner
    claims = {
        "sub": owner,
        "role": grant.role,
        "key": grant.key_id,
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


def _grant_in(root: Path, token: str) -> Grant | None:
    try:
        claims = jwt.decode(token, _secret(root), [ALGORITHM], {"require": CLAIMS})
    except jwt.InvalidTokenError:
        return None
    return Grant(claims["sub"], claims["role"], claims["key"])
