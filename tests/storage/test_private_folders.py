"""Folders of predictable names in places that other users may write to."""

import json
import os
from pathlib import Path

import pytest

from skyrl_actors.commands import cluster, haproxy, serve
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.transfers import SHARED_MEMORY
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.storage import private_folders
from skyrl_actors.storage.private_folders import make_folder, private_folder, run_folder

OTHER_USER = 54321
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make folders of another user")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder with the permissions of /tmp."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.fixture
def run(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = shared / "skyrl-actors-0"
    monkeypatch.setattr(private_folders, "RUN_FOLDER", folder)
    monkeypatch.setattr(haproxy, "RUN_FOLDER", folder)
    return folder


def test_folders_are_created_for_this_user_alone(shared: Path):
    made = make_folder(shared / "ours" / "service" / "weights")
    for folder in (made, made.parent, made.parent.parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert make_folder(made) == private_folder(made) == made


@AS_ROOT
@pytest.mark.parametrize("depth", [0, 1])
def test_a_folder_of_another_user_is_refused(
    shared: Path, depth: int, monkeypatch: pytest.MonkeyPatch
):
    theirs = shared / "service"
    theirs.mkdir()
    os.chown(theirs, OTHER_USER, OTHER_USER)
    with pytest.raises(ConfigError, match=rf"{theirs} belongs to another user \(id {OTHER_USER}\)"):
        make_folder(theirs / "weights" if depth else theirs)
    assert not list(theirs.iterdir())


def test_a_link_is_refused(shared: Path, tmp_path: Path):
    target = tmp_path / "target"
    target.mkdir()
    (shared / "service").symlink_to(target)
    with pytest.raises(ConfigError, match="is not a folder"):
        make_folder(shared / "service" / "weights")
    assert not list(target.iterdir())


def test_a_world_writable_folder_is_refused(shared: Path):
    (shared / "service").mkdir()
    (shared / "service").chmod(0o777)
    with pytest.raises(ConfigError, match=r"open to other users \(mode 777\)"):
        make_folder(shared / "service" / "weights")


def test_a_private_folder_that_others_may_read_is_refused(shared: Path):
    (shared / "service").mkdir(mode=0o755)
    make_folder(shared / "service")
    with pytest.raises(ConfigError, match="chmod 700"):
        private_folder(shared / "service")


def test_the_run_folder_is_closed_if_others_may_only_read_it(run: Path):
    run.mkdir(mode=0o755)
    assert run_folder() == run and run.stat().st_mode & 0o777 == 0o700
    run.chmod(0o775)
    with pytest.raises(ConfigError, match="open to other users"):
        run_folder()


def test_folders_that_only_their_owner_can_change_are_accepted(tmp_path: Path):
    (tmp_path / "storage").mkdir(mode=0o775)
    assert make_folder(tmp_path / "storage" / "weights").is_dir()


def test_folder_names_contain_the_user_id():
    for folder in (SHARED_MEMORY, private_folders.RUN_FOLDER):
        assert folder.name.endswith(f"-{os.getuid()}")
    assert private_folders.RUN_FOLDER in haproxy.folder("name").parents
    # A socket's path may have 97 characters.
    assert len(str(haproxy.folder("name") / "admin.sock")) < 60


@AS_ROOT
def test_the_launcher_is_not_written_to_a_folder_of_another_user(run: Path):
    run.mkdir()
    os.chown(run, OTHER_USER, OTHER_USER)
    with pytest.raises(ConfigError, match="belongs to another user"):
        haproxy.environment(ClusterConfig())
    assert not list(run.iterdir())


@AS_ROOT
def test_a_state_file_of_another_user_is_not_used(run: Path, tmp_path: Path):
    """The file names processes to end and a folder to remove."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (run / "services").mkdir(parents=True)
    (run / "services" / "mine.json").write_text(
        json.dumps({"started_ray": False, "transfer": str(precious)})
    )
    os.chown(run, OTHER_USER, OTHER_USER)
    with pytest.raises(ConfigError, match="belongs to another user"):
        serve.stop("mine")
    assert precious.is_dir()


def test_other_users_cannot_replace_files_in_rays_folder(
    shared: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cluster, "ray_folder", lambda: str(shared / "ray"))
    cluster.guard_ray_folder()
    assert (shared / "ray").stat().st_mode & 0o7777 == 0o1777
    (shared / "ray").chmod(0o777)  # as Ray does when it starts
    cluster.guard_ray_folder()
    assert (shared / "ray").stat().st_mode & 0o7777 == 0o1777


@AS_ROOT
def test_a_ray_address_written_by_another_user_is_not_used(
    shared: Path, monkeypatch: pytest.MonkeyPatch
):
    (shared / "ray").mkdir()
    file = shared / "ray" / "ray_current_cluster"
    file.write_text("10.0.0.1:6379")
    monkeypatch.setattr(cluster, "ray_folder", lambda: str(shared / "ray"))
    monkeypatch.setattr(cluster, "get_ray_address_file", lambda folder: str(file))
    monkeypatch.setattr(cluster.ray_utils, "read_ray_address", lambda: file.read_text())
    assert cluster.ray_address() == "10.0.0.1:6379"
    os.chown(file, OTHER_USER, OTHER_USER)
    with pytest.raises(ConfigError, match="was written by another user"):
        cluster.ray_address()
    os.chown(shared / "ray", OTHER_USER, OTHER_USER)
    with pytest.raises(ConfigError, match="set RAY_TMPDIR"):
        cluster.ray_address()
