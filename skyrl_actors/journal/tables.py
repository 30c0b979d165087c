"""The journal's tables for SQLAlchemy. The revisions in `migrations/` create and change them."""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    text,
)

from skyrl_actors.messages.usage import COUNTED

PROJECT = "skyrl-actors"
metadata = MetaData()
MODE = "mode"
LAST_NUMBER = "last_number"
"""Key in `journal_info`: no later operation gets this number or a lower one."""

# Conditions of partial indexes. A query uses the index only if it has the same text.
IDLE = text("effect = 'none'")
OWED = text("answered_at IS NULL")
OF_SAMPLERS = text("model_id IS NULL")
LIFETIMES = text("kind IN ('CreateModel', 'Unload')")


def _partial(name: str, *columns: str, where: Any) -> Index:
    return Index(name, *columns, sqlite_where=where, postgresql_where=where)


info = Table(
    "journal_info",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("value", Text, nullable=False),
)

sessions = Table(
    "sessions",
    metadata,
    Column("session_id", String(128), primary_key=True),
    Column("user_metadata", Text, nullable=False),
    Column("opened_at", Float, nullable=False),
    Column("ended_at", Float),
)

operations = Table(
    "operations",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("request_id", String(64), nullable=False, unique=True),
    Column("kind", String(32), nullable=False),
    Column("stream", String(160), nullable=False),
    Column("seq_id", BigInteger),
    Column("digest", BigInteger, nullable=False),
    Column("model_id", String(128)),
    Column("session_id", String(128)),
    Column("accepted_at", Float, nullable=False),
    Column("payload_pack", String(64)),
    Column("payload_offset", BigInteger),
    Column("payload_length", BigInteger),
    Column("payload_digest", String(64)),
    Column("answered_at", Float),
    Column("effect", String(16)),
    Column("failed", Boolean, nullable=False, default=False),
    Column("step", Integer),
    Column("result_pack", String(64)),
    Column("result_offset", BigInteger),
    Column("result_length", BigInteger),
    Column("result_digest", String(64)),
    Column("images", Text),  # digests of the request's images, each once, with spaces between
    Index("operations_of_model", "model_id", "number"),
    Index("operations_of_session", "session_id", "number"),
    _partial("operations_idle", "answered_at", where=IDLE),
    _partial("operations_owed", "number", where=OWED),
    _partial("operations_of_sampler", "stream", "number", where=OF_SAMPLERS),
    _partial("operations_of_lifetimes", "kind", "session_id", where=LIFETIMES),
)

samplers = Table(
    "samplers",
    metadata,
    Column("sampler_id", String(128), primary_key=True),
    Column("session_id", String(128)),
    Column("base_model", Text, nullable=False),
    Column("model_path", Text),
    Column("weights", Text, nullable=False),  # a SamplerWeights as JSON
    Column("owner", String(128)),
    Column("number", BigInteger),
    Column("retired", Boolean, nullable=False, default=False),
    Index("samplers_of_model", "owner", "number"),
)

snapshots = Table(
    "snapshots",
    metadata,
    Column("model_id", String(128), primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("step", Integer, nullable=False),
    Column("folder", String(200), nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("taken_at", Float, nullable=False),
)

packs = Table(
    "packs",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("records", BigInteger, nullable=False),  # in rows; a pack without any is removed
)

images = Table(
    "images",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("pack", String(64), nullable=False),
    Column("start", BigInteger, nullable=False),
    Column("length", BigInteger, nullable=False),
    Column("users", BigInteger, nullable=False),  # rows of operations; without any it is removed
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("digest", String(80), primary_key=True),
    Column("name", String(64), nullable=False),
    Column("role", String(16), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("revoked_at", Float),
)

audit = Table(
    "audit",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("at", Float, nullable=False),
    Column("actor", Text, nullable=False),
    Column("act", String(32), nullable=False),
    Column("subject", Text, nullable=False),
)

quotas = Table(
    "quotas",
    metadata,
    Column("owner", String(16), primary_key=True),
    Column("name", String(64), nullable=False),
    Column("quota", Text, nullable=False),  # a Quota as JSON
)

usage_hours = Table(
    "usage_hours",
    metadata,
    Column("hour", BigInteger, primary_key=True, autoincrement=False),
    Column("owner", String(16), primary_key=True),
    Column("session_id", String(128), primary_key=True),
    Column("base_model", Text, primary_key=True),
    *(Column(name, BigInteger, nullable=False) for name in COUNTED),
)

trimmed = Table(
    "trimmed",
    metadata,
    Column("model_id", String(128), primary_key=True),
    Column("number", BigInteger, nullable=False),  # of the newest removed operation
)
