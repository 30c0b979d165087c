"""Store the model's step in each operation, so that a past step can be found."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column, and fill it for operations with an answer."""
    op.add_column("operations", sa.Column("step", sa.Integer()))
    # For answered operations, count the model's optim_steps that were applied up to there.
    op.execute(
        "UPDATE operations SET step = ("
        "SELECT count(*) FROM operations AS past WHERE past.model_id = operations.model_id "
        "AND past.number <= operations.number "
        "AND past.kind = 'OptimStep' AND past.effect = 'applied') "
        "WHERE answered_at IS NOT NULL AND model_id IS NOT NULL"
    )
