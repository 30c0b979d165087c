"""Remove folders of ended Ray sessions. Ray keeps one for each start, and never removes it.

The newest ones stay, because their logs tell why a start failed.
"""

import os
import shutil
from pathlib import Path

import psutil

KEPT = 5
PREFIX = "session_20"  # followed by the date of its start
LATEST = "session_latest"  # by this link, `stop` finds the processes of a session


def remove_old_sessions(folder: Path, kept: int = KEPT) -> list[Path]:
    """Remove this user's ended sessions in Ray's folder, except the newest. Return what is gone."""
    try:
        mine = sorted(
            path
            for path in folder.glob(f"{PREFIX}*")
            if path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid()
        )
    except OSError:
        return []
    commands = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    ended = [path for path in mine if not any(path.name in command for command in commands)]
    gone = ended[: max(0, len(ended) - kept)]
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)
    _remove_dangling(folder / LATEST)
    return gone


def _remove_dangling(link: Path) -> None:
    """Remove a link to a session that is gone. Ray replaces only links that lead somewhere."""
    try:
        if link.is_symlink() and not link.exists() and link.lstat().st_uid == os.getuid():
            link.unlink()
    except OSError:
        return
