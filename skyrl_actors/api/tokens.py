"""API keys and the tokens that SDKs get in exchange (JWT, RFC 7519, HS256): both name an owner."""

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
    """Of an API key or one of our tokens; None when it is neither, or has ended, or its key is no longer allowed."""
    if credential.count(".") == 2 and credential.startswith("eyJ"):
        owner = _owner_in(state.folders.root, credential)
        return owner if owner in state.owners.values() else None
    return state.owners.get(digest_of(credential))


def token_for(root: Path, owner: str) -> str:
    now = int(time.time())
    claims = {"sub": owner, "org_id": "local", "email": f"{owner}@localhost", "iat": now, "exp": now + VALID_S}
    return jwt.encode(claims, _secret(root), ALGORITHM)


@lru_cache
def _secret(root: Path) -> bytes:
    """Read once: every request with a token needs it."""
    return secret_of(root, SECRET_FILE)


def _owner_in(root: Path, token: str) -> str | None:
    try:
        return jwt.decode(token, _secret(root), [ALGORITHM], {"require": ["sub", "exp"]})["sub"]
    except jwt.InvalidTokenError:
        return None
