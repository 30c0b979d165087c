"""The first schema of the journal."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create all tables of the first version, with their indexes."""
    op.create_table(
        "journal_info",
        sa.Column("key", sa.String(64), primary_key=True),
        sa.Column("value", sa.Text(), nullable=False),
    )
    op.create_table(
        "sessions",
        sa.Column("session_id", sa.String(128), primary_key=True),
        sa.Column("user_metadata", sa.Text(), nullable=False),
        sa.Column("opened_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float()),
    )
    op.create_table(
        "operations",
        sa.Column("number", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("request_id", sa.String(64), nullable=False, unique=True),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("stream", sa.String(160), nullable=False),
        sa.Column("seq_id", sa.BigInteger()),
        sa.Column("digest", sa.BigInteger(), nullable=False),
        sa.Column("model_id", sa.String(128)),
        sa.Column("session_id", sa.String(128)),
        sa.Column("accepted_at", sa.Float(), nullable=False),
        *(_blob("payload")),
        sa.Column("answered_at", sa.Float()),
        sa.Column("effect", sa.String(16)),
        sa.Column("failed", sa.Boolean(), nullable=False, server_default=sa.false()),
        *(_blob("result")),
    )
    op.create_index("operations_of_model", "operations", ["model_id", "number"])
    op.create_index("operations_of_session", "operations", ["session_id", "number"])
    op.create_table(
        "samplers",
        sa.Column("sampler_id", sa.String(128), primary_key=True),
        sa.Column("session_id", sa.String(128)),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("model_path", sa.Text()),
        sa.Column("weights", sa.Text(), nullable=False),
        sa.Column("owner", sa.String(128)),
        sa.Column("number", sa.BigInteger()),
        sa.Column("retired", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
    op.create_table(
        "snapshots",
        sa.Column("model_id", sa.String(128), primary_key=True),
        sa.Column("number", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("folder", sa.String(200), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("taken_at", sa.Float(), nullable=False),
    )


def _blob(name: str) -> list[sa.Column[Any]]:
    return [
        sa.Column(f"{name}_pack", sa.String(64)),
        sa.Column(f"{name}_offset", sa.BigInteger()),
        sa.Column(f"{name}_length", sa.BigInteger()),
        sa.Column(f"{name}_digest", sa.String(64)),
    ]
