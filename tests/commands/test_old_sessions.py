"""Old folders of Ray are removed, and neither the newest nor those of live sessions."""

import subprocess
import sys
from pathlib import Path

from ray._private.utils import try_to_symlink

from skyrl_actors.commands.old_sessions import remove_old_sessions


def test_ended_sessions_are_removed_except_the_newest_and_live_ones(tmp_path: Path):
    names = [f"session_2026-11-0{day}_01-00-00_000000_{day}" for day in range(1, 8)]
    for name in names:
        (tmp_path / name / "logs").mkdir(parents=True)
    (tmp_path / "session_latest").symlink_to(tmp_path / names[-1])
    (tmp_path / "other").mkdir()
    hold = [sys.executable, "-c", "import sys; sys.stdin.read()", str(tmp_path / names[0])]
    with subprocess.Popen(hold, stdin=subprocess.PIPE) as process:
        gone = remove_old_sessions(tmp_path, kept=3)
        process.communicate()
    assert [path.name for path in gone] == names[1:4]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {names[0], *names[4:], "session_latest", "other"}
    assert remove_old_sessions(tmp_path / "missing") == []


def test_ray_links_its_next_session_after_the_linked_one_was_removed(tmp_path: Path):
    latest, old, new = (tmp_path / name for name in ("session_latest", "session_2001-1", "next"))
    for folder in (old, new, tmp_path / "session_2001-2"):
        folder.mkdir()
    latest.symlink_to(old)
    assert remove_old_sessions(tmp_path, kept=1) == [old]
    try_to_symlink(str(latest), str(new))  # as a node of Ray does
    assert latest.resolve() == new
