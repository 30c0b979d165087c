"""The configs of the base models of a service that has several."""

import re
from collections.abc import Mapping
from typing import Any, cast

from pydantic import Field

from skyrl_actors.config.frozen import FrozenConfig

Keys = dict[str, Any]
OWN_KEYS = (  # the sections that a base model can have for itself
    "base_model",
    "policy",
    "critic",
    "engine",
    "lora",
    "router_replay",
    "transfer",
    "logprob_check",
)
# Keys of the whole service. The name of a shard has a dot, which no name in a file may have.
OF_SERVICE = ("base_models", "parking", "base_model", "name")
LABEL = re.compile(r"[a-z0-9][a-z0-9_-]{0,20}")


class ParkingConfig(FrozenConfig):
    """How several base models alternate on the devices. It needs `base_models`."""

    min_residence_s: float = Field(
        default=10.0,
        ge=0,
        description="how long a base model that is used stays on the devices while others wait; "
        "longer if moving it takes more than a tenth of that",
    )
    idle_s: float = Field(
        default=2.0,
        ge=0,
        description="how long a base model without running requests stays while others wait",
    )
    max_resident: int | None = Field(
        default=None,
        ge=1,
        description="base models on the devices at once; null = as many as the memory plan allows",
    )
    max_loaded: int | None = Field(
        default=None,
        ge=1,
        description="base models that processes hold, on the devices or in host memory; others "
        "are loaded from disk when they are needed. null = as many as the host memory holds by "
        "the memory plan",
    )


def check_labels(base_models: Mapping[str, Keys]) -> None:
    """Raise ValueError for a label or a key that is not allowed."""
    for label, entry in base_models.items():
        if not LABEL.fullmatch(label):
            raise ValueError(
                f"base_models.{label}: a label has 1 to 21 small letters, digits, - and _"
            )
        if unknown := sorted(entry.keys() - set(OWN_KEYS)):
            raise ValueError(
                f"base_models.{label}.{unknown[0]}: a base model cannot have this for itself; "
                f"allowed here: {', '.join(OWN_KEYS)}"
            )
        if "base_model" not in entry:
            raise ValueError(f"base_models.{label}.base_model is missing; it names the model")


UNIONS = ("transfer", "strategy", "full_strategy")  # sections whose keys follow from their type


def dumped(config: FrozenConfig) -> Keys:
    """Return the keys that were set, and the type of every section that has one."""
    found: Keys = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        is_set = name in config.model_fields_set
        if isinstance(value, FrozenConfig):
            below = dumped(value)
            if is_set or name in UNIONS:
                found[name] = below
        elif is_set or name == "type":
            found[name] = value
    return found


def keys_of(common: Keys, entry: Keys) -> Keys:
    """Return the keys of one base model's config: those of the service, overridden by its own."""
    shared = {k: v for k, v in common.items() if k not in OF_SERVICE}
    return _merged(shared, entry)


def _merged(below: Keys, above: Keys) -> Keys:
    found = dict(below)
    for key, value in above.items():
        under = found.get(key)
        if isinstance(value, dict) and isinstance(under, dict):
            one, other = cast(Keys, under), cast(Keys, value)
            # Another type of a union has other keys.
            is_other = key in UNIONS and other.get("type", one.get("type")) != one.get("type")
            found[key] = other if is_other else _merged(one, other)
        else:
            found[key] = value
    return found
