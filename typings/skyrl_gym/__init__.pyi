"""The part of skyrl-gym that this project uses."""

from typing import Any

from skyrl_gym import error as error

def make(id: str, **options: Any) -> Any: ...
