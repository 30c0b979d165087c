"""The journal's tables as SQLAlchemy sees them. The revisions in `migrations/` make and change them."""

from sqlalchemy import BigInteger, Boolean, Column, Float, Index, Integer, MetaData, String, Table, Text

PROJECT = "skyrl-actors"
metadata = MetaData()

info = Table("journal_info", metadata, Column("key", String(64), primary_key=True), Column("value", Text, nullable=False))

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
    Index("operations_of_model", "model_id", "number"),
    Index("operations_of_session", "session_id", "number"),
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
