"""What all config objects share: frozen, unknown keys refused."""

from pydantic import BaseModel, ConfigDict


class FrozenConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
