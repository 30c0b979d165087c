"""Store each image once, and count the requests that have it."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table of images, and the column of their digests. Older requests keep theirs."""
    op.create_table(
        "images",
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("pack", sa.String(64), nullable=False),
        sa.Column("start", sa.BigInteger(), nullable=False),
        sa.Column("length", sa.BigInteger(), nullable=False),
        sa.Column("users", sa.BigInteger(), nullable=False),
    )
    op.add_column("operations", sa.Column("images", sa.Text()))
