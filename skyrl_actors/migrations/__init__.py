"""One module for each change of the journal's tables. Alembic runs them in order."""
