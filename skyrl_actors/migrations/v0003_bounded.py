"""Count the records of packs, and index the rows that a start and a sweep need."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables, count the records of existing packs, and create the indexes."""
    op.create_table(
        "packs",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("records", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "trimmed",
        sa.Column("model_id", sa.String(128), primary_key=True),
        sa.Column("number", sa.BigInteger(), nullable=False),
    )
    op.execute(
        "INSERT INTO packs (name, records) SELECT name, count(*) FROM ("
        "SELECT payload_pack AS name FROM operations WHERE payload_pack IS NOT NULL "
        "UNION ALL SELECT result_pack FROM operations WHERE result_pack IS NOT NULL) AS used "
        "GROUP BY name"
    )
    _index("operations_idle", ["answered_at"], "effect = 'none'")
    _index("operations_owed", ["number"], "answered_at IS NULL")
    _index("operations_of_sampler", ["stream", "number"], "model_id IS NULL")
    _index("operations_of_lifetimes", ["kind", "session_id"], "kind IN ('CreateModel', 'Unload')")
    op.create_index("samplers_of_model", "samplers", ["owner", "number"])


def _index(name: str, columns: list[str], where: str) -> None:
    op.create_index(
        name, "operations", columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where)
    )
