"""The config of the HTTP endpoint."""

import ipaddress
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import Field, field_validator, model_validator

from skyrl_actors.config import keys
from skyrl_actors.config.frozen import FrozenConfig
from skyrl_actors.config.sdk_flags import with_defaults

EVERY_ADDRESS = "0.0.0.0"


class HttpConfig(FrozenConfig):
    """The HTTP endpoint."""

    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8000, ge=1, le=65535, description="port to listen on")
    nodes: Literal["head", "all"] = Field(
        default="head",
        description="nodes of the Ray cluster that listen: the head node, or `all` that have an "
        "ingress process, so that a load balancer in front of them survives the loss of the head; "
        "`all` needs host 0.0.0.0",
    )
    public_url: str | None = Field(
        default=None,
        pattern=r"^https?://[^/?#@\s]+(/[^?#\s]*)?$",
        description="address for clients if it differs from host and port, for example "
        "https://rl.example.com behind a proxy; links to checkpoints start with it",
    )
    replicas: int = Field(
        default=2,
        ge=1,
        description="ingress processes; with two, requests are served while one restarts",
    )
    max_replicas: int | None = Field(
        default=None,
        ge=1,
        description="upper bound of the ingress processes, which Ray Serve adds under load; "
        "null = always `replicas`",
    )
    api_keys: tuple[str, ...] = Field(
        default=(),
        description="accepted X-API-Key values as [name=]key or [name=]sha256:<hex>, kept as "
        "hashes; empty = every key is accepted",
    )
    api_keys_file: Path | None = Field(
        default=None, description="file with API keys in the same format, one on each line"
    )
    open_to_network: bool = Field(
        default=False, description="allow a host outside this machine although no API keys are set"
    )
    tempered_logprobs: bool = Field(
        default=False,
        description="return logprobs of samples at the sampling temperature instead of 1; "
        "a request can override this",
    )
    processed_logprobs: bool = Field(
        default=False,
        description="return logprobs of the distribution that samples come from: at the sampling "
        "temperature, restricted by top_k and top_p; a request can override this",
    )
    sdk: dict[str, bool] = Field(
        default_factory=lambda: with_defaults({}),
        description="flags that the service sends to SDKs, each with true or false, for example "
        "`http.sdk.pjwt_auth_enabled=true`; the list below has their names and defaults",
    )
    console: Path | None = Field(
        default=Path("runs"),
        description="folder of job runs that the read-only page at / shows; null = no page. With "
        "API keys set, only admins see its runs, and visitors without a key only totals",
    )

    images: Path | None = Field(
        default=None,
        description="folder of images that clients may name in an image_asset_pointer, by their "
        "relative path; each node that serves HTTP needs it. All clients can use all of its "
        "images. null = clients send images themselves",
    )

    @model_validator(mode="after")
    def _grows(self) -> "HttpConfig":
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas {self.max_replicas} is below replicas {self.replicas}")
        return self

    @model_validator(mode="after")
    def _listens_on_each_node(self) -> "HttpConfig":
        if self.nodes == "all" and self.host != EVERY_ADDRESS:
            raise ValueError(
                f"nodes=all needs host {EVERY_ADDRESS}: {self.host} is an address of one machine"
            )
        if self.nodes == "all" and self.replicas < 2:
            raise ValueError("nodes=all needs at least 2 replicas: each node that listens has one")
        return self

    @model_validator(mode="before")
    @classmethod
    def _with_keys_of_file(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        content = cast("dict[str, Any]", data)
        file = content.get("api_keys_file")
        if file is None:
            return content
        try:
            found = keys.entries_in(Path(file).expanduser().read_text())
        except OSError as error:
            raise ValueError(f"api_keys_file {file}: {error.strerror}") from None
        if not found:
            raise ValueError(f"api_keys_file {file} has no key; write one [name=]key on each line")
        return content | {"api_keys": [*(content.get("api_keys") or ()), *found]}

    @field_validator("console", mode="before")
    @classmethod
    def _is_a_folder(cls, console: object) -> object:
        if isinstance(console, bool):
            raise ValueError(
                f"{str(console).lower()} is no folder; use the folder of runs, or null for no page"
            )
        return console

    @field_validator("images")
    @classmethod
    def _exists(cls, images: Path | None) -> Path | None:
        if images is None:
            return None
        if not images.expanduser().is_dir():
            raise ValueError(f"{images} is no folder; make it, or set null for none")
        return images.expanduser().resolve()

    @field_validator("sdk")
    @classmethod
    def _known_flags(cls, flags: dict[str, bool]) -> dict[str, bool]:
        return with_defaults(flags)

    @field_validator("api_keys")
    @classmethod
    def _hashed(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(keys.hashed(entry) for entry in entries))

    @model_validator(mode="after")
    def _network_needs_keys(self) -> "HttpConfig":
        if not (is_loopback(self.host) or self.api_keys or self.open_to_network):
            raise ValueError(
                f"host {self.host} is open to the network and api_keys is empty, so anybody could "
                "use the service; set http.api_keys=[tml-…], http.api_keys_file or "
                "SKYRL_ACTORS_API_KEYS, or http.open_to_network=true if that is intended"
            )
        return self


def is_loopback(host: str) -> bool:
    """Return whether only processes of this machine reach a server on this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
