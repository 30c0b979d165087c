"""The oldest SDK, one with JSON only and the newest one, with the HTTP application.

`make sdk-matrix` runs twelve versions.
"""

from pathlib import Path

import pytest

from tests.matrix.run import local_service, outcomes


@pytest.mark.parametrize(
    ("version", "at_least"),
    [("0.3.0", 20), pytest.param("0.24.1", 40, marks=pytest.mark.slow), ("0.38.0", 42)],
)
def test_every_call_of_this_version_works(version: str, at_least: int, random_base: Path):
    with local_service(random_base) as url:
        found = outcomes(version, url)
    assert {name: said for name, said in found.items() if said not in ("ok", "absent")} == {}
    assert sum(said == "ok" for said in found.values()) >= at_least


ALL_FLAGS = {
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": True,
    "proto_write_fwdbwd": True,
    "fwd_via_fwdbwd": True,
    "create_model_via_load_weights": True,
    "sample_use_retrieve_futures": True,
    "sample_join_sampling_session": True,
    "custom_loss_server_side": True,
    "pjwt_auth_enabled": True,
}


@pytest.mark.parametrize("version", ["0.38.0"])
def test_every_call_works_with_keys_tokens_and_all_flags(version: str, random_base: Path):
    with local_service(random_base, api_keys=["tml-matrix-key"], sdk=ALL_FLAGS) as url:
        found = outcomes(version, url, key="tml-matrix-key")
    assert {name: said for name, said in found.items() if said not in ("ok", "absent")} == {}
    assert sum(said == "ok" for said in found.values()) >= 40
