"""`key`: API keys, of a running service or for http.api_keys_file.

The secret is created here. Only its hash goes to the service.
"""

import json
import secrets
import time
from dataclasses import asdict

from skyrl_actors.commands.asking import actor, asked, seconds_in, time_text
from skyrl_actors.commands.terminal import console, show_rows
from skyrl_actors.config.keys import digest_of, hashed
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.messages.keys import ROLES, Role, StoredKey


def make(name: str) -> None:
    """Print a new key and its hashed entry. Raises ConfigError if the name is not allowed."""
    made = _secret()
    try:
        line = hashed(f"{name}={made}" if name else made)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    console.print(f"key   {made}\nline  {line}", soft_wrap=True, highlight=False)


def add(name: str, role: str, expires: str | None, service: str) -> None:
    """Add a key to a running service, and print it."""
    secret = _secret()
    key = _key(secret, name, role, expires)
    others = asked(service, lambda calls: calls.list_keys())
    asked(service, lambda calls: calls.add_key(key, actor()))
    _print_secret(secret, key)
    if not others:
        console.print(
            "Until now the service accepted any key. From now on it accepts only this one, and "
            "what was created without keys belongs to nobody."
        )


def rotate(name: str, grace: str, role: str | None, expires: str | None, service: str) -> None:
    """Add a key, and end the other keys of its name and role after a time."""
    secret, grace_s = _secret(), seconds_in(grace)
    if role is None:
        keys, now = asked(service, lambda calls: calls.list_keys()), time.time()
        roles = {old.role for old in keys if old.name == name and old.is_valid(now)}
        if len(roles) > 1:
            raise ConfigError(
                f"{name} has keys of the roles {', '.join(sorted(roles))}; use --role"
            )
        role = next(iter(roles), "tenant")
    key = _key(secret, name, role, expires)
    ended = asked(service, lambda calls: calls.rotate_key(key, grace_s, actor()))
    _print_secret(secret, key)
    for old in ended:
        console.print(f"{old.key_id} ends at {time_text(old.expires_at)}", highlight=False)


def revoke(which: str, service: str) -> None:
    """Revoke keys of a running service."""
    at = time.time()
    for key in asked(service, lambda calls: calls.revoke_key(which, actor(), at)):
        console.print(f"revoked {key.name or '-'} {key.key_id}", highlight=False)


def show(as_json: bool, service: str) -> None:
    """List the keys of a running service, without their secrets."""
    keys = asked(service, lambda calls: calls.list_keys())
    if as_json:
        print(json.dumps([{"key_id": key.key_id, **asdict(key)} for key in keys], indent=2))
        return
    now = time.time()
    show_rows(
        "keys",
        [
            {
                "key_id": key.key_id,
                "name": key.name,
                "role": key.role,
                "state": state_of(key, now),
                "created": time_text(key.created_at) if key.created_at else "in the config",
                "expires": time_text(key.expires_at),
            }
            for key in keys
        ],
    )


def audit(last: int, as_json: bool, service: str) -> None:
    """List the newest entries of the audit log."""
    entries = asked(service, lambda calls: calls.audit(last))
    if as_json:
        print(json.dumps([asdict(entry) for entry in entries], indent=2))
        return
    show_rows("audit", [{**asdict(entry), "at": time_text(entry.at)} for entry in entries])


def state_of(key: StoredKey, now: float) -> str:
    """Return `valid`, `revoked` or `expired`."""
    if key.is_valid(now):
        return "valid"
    return "expired" if key.revoked_at is None else "revoked"


def _secret() -> str:
    return f"tml-{secrets.token_hex(24)}"


def _key(secret: str, name: str, role: str, expires: str | None) -> StoredKey:
    if role not in ROLES:
        raise ConfigError(f"the role is {role!r}; use {', '.join(ROLES)}")
    allowed: Role = role
    now = time.time()
    return StoredKey(
        digest=digest_of(secret),
        name=name,
        role=allowed,
        created_at=now,
        expires_at=None if expires is None else now + seconds_in(expires),
    )


def _print_secret(secret: str, key: StoredKey) -> None:
    until = "" if key.expires_at is None else f", expires at {time_text(key.expires_at)}"
    text = f"key  {secret}\nid   {key.key_id} ({key.name}, {key.role}{until})"
    console.print(text, soft_wrap=True, highlight=False)
