"""The oldest, a JSON-only and the newest SDK against the HTTP application; `make sdk-matrix` drives twelve versions."""

from pathlib import Path

import pytest

from tests.matrix.run import local_service, outcomes


@pytest.mark.parametrize(("version", "at_least"), [("0.3.0", 20), ("0.24.1", 40), ("0.38.0", 42)])
def test_every_call_of_this_version_works(version: str, at_least: int, random_base: Path):
    with local_service(random_base) as url:
        found = outcomes(version, url)
    assert {name: said for name, said in found.items() if said not in ("ok", "absent")} == {}
    assert sum(said == "ok" for said in found.values()) >= at_least
