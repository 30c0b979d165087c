"""The texts by which `stop` finds the processes of the Ray session that `serve` started."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from skyrl_actors.commands import serve


def test_a_service_notes_the_session_that_it_joined_not_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("session_2001-1", "session_2001-2"):
        (tmp_path / name).mkdir()
    (tmp_path / "session_latest").symlink_to(tmp_path / "session_2001-2")  # of another Ray
    context = SimpleNamespace(
        get_session_name=lambda: "session_2001-1", gcs_address="10.0.0.1:6379"
    )
    monkeypatch.setattr(serve.cluster, "ray_folder", lambda: str(tmp_path))
    monkeypatch.setattr(serve.typed_ray, "get_runtime_context", lambda: context)
    marks = serve._joined_marks()
    assert marks == [f"{tmp_path}/session_2001-1", "--address=10.0.0.1:6379"]
