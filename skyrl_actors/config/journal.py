"""The config of the journal."""

import re
from pathlib import Path

from pydantic import Field, field_validator, model_validator

from skyrl_actors.config.frozen import FrozenConfig
from skyrl_actors.config.state_folder import shown_place

# As SQLAlchemy reads it: a password may have any character except "@".
_DATABASE = re.compile(
    r"(?P<before>[\w+]+://(?:[^:/@]*(?::[^@]*)?@)?[^/?]*)/(?P<database>[^?/]+)(?P<options>\?.*)?"
)


class JournalConfig(FrozenConfig):
    """The durable log of accepted requests and their answers.

    `serve` with the same journal resumes where it stopped. XDG_STATE_HOME replaces ~/.local/state.
    """

    folder: Path = Field(
        default=Path("journal"),  # `ClusterConfig` replaces it
        json_schema_extra={"shown_default": shown_place("journal")},
        description="folder for payloads, results and snapshots; with SQLite also for the database",
    )
    url: str | None = Field(
        default=None,
        description="postgresql://user:password@host/database; null = SQLite in `folder`",
    )
    mirror: str | None = Field(
        default=None,
        pattern=r"^[a-z0-9]+://",
        description="a second location of payloads, results and snapshots as an fsspec address: "
        "s3://bucket/folder, gs://…, file://…; they are copied there before a request is accepted "
        "or answered, and read from there if `folder` lost them. Needs `url`",
    )
    snapshot_operations: int = Field(
        default=64, ge=1, description="snapshot a model after this number of operations"
    )
    snapshot_s: float = Field(
        default=60.0,
        gt=0,
        description="also snapshot a trained model when its last snapshot is older than this",
    )
    retention_s: float = Field(
        default=24 * 3600.0,
        gt=0,
        description="period for which models can be rebuilt and answers can be read",
    )

    def of_shard(self, number: int) -> "JournalConfig":
        """Return the journal of a shard: folders and a database beside those of the first one.

        Raises ValueError if the URL names no database.
        """
        if number == 1:
            return self
        url, mirror = self.url, self.mirror
        if url is not None:
            if (parts := _DATABASE.fullmatch(url)) is None:
                raise ValueError(
                    "journal.url names no database, and each shard needs its own, with the number "
                    "of the shard behind that name; use postgresql://user:password@host/database"
                )
            url = f"{parts['before']}/{parts['database']}_{number}{parts['options'] or ''}"
        if mirror is not None:
            mirror = f"{mirror.rstrip('/')}_{number}"
        folder = self.folder.with_name(f"{self.folder.name}_{number}")
        return self.model_copy(update={"folder": folder, "url": url, "mirror": mirror})

    @model_validator(mode="after")
    def _outlives_its_machine(self) -> "JournalConfig":
        if self.mirror is not None and self.url is None:
            raise ValueError(
                "mirror without url: the database would be lost with the machine; set url to a "
                "PostgreSQL database, or leave out mirror"
            )
        return self

    @field_validator("url")
    @classmethod
    def _known_database(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(
            ("postgresql://", "postgresql+psycopg://", "postgres://")
        ):
            raise ValueError(
                "use postgresql://user:password@host/database, or leave out url for SQLite in "
                "journal.folder"
            )
        return url
