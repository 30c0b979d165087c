"""Keep quotas of API keys, and what each session used in each hour."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables of quotas and of usage."""
    op.create_table(
        "quotas",
        sa.Column("owner", sa.String(16), primary_key=True),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("quota", sa.Text(), nullable=False),
    )
    counted = ("requests", "failed", "trained_tokens", "prompt_tokens", "sampled_tokens")
    op.create_table(
        "usage_hours",
        sa.Column("hour", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("owner", sa.String(16), primary_key=True),
        sa.Column("session_id", sa.String(128), primary_key=True),
        sa.Column("base_model", sa.Text(), primary_key=True),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in (*counted, "checkpoints")),
    )
