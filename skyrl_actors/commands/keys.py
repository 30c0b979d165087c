"""`key`: create an API key, and the line for http.api_keys_file."""

import secrets

from skyrl_actors.commands.terminal import console
from skyrl_actors.config.keys import hashed
from skyrl_actors.messages.errors import ConfigError


def make(name: str) -> None:
    """Print a new key and its hashed entry. Raises ConfigError if the name is not allowed."""
    made = f"tml-{secrets.token_hex(24)}"
    try:
        line = hashed(f"{name}={made}" if name else made)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    console.print(f"key   {made}\nline  {line}", soft_wrap=True, highlight=False)
