"""Passwords of databases are in no message."""

from pathlib import Path

import pytest

from skyrl_actors.config.keys import masked
from skyrl_actors.journal.opening import database_url


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ann:hunter2@db:5432/journal",
        "postgresql:///journal?host=/run/pg&user=ann&password=hunter2",
        "postgresql://db/journal?user=ann&password=hunter2&sslmode=require",
        "postgres://ann@db/journal?password=hunter2",
    ],
)
def test_a_password_is_used_and_not_shown(url: str):
    found = database_url(Path("/x"), url)
    assert (found.username, found.password) == ("ann", "hunter2")
    assert found.get_backend_name() == "postgresql" and found.database == "journal"
    assert "hunter2" not in str(found) and "hunter2" not in masked(f"journal.url={url}; x")
    assert "password" not in found.query and "user" not in found.query
