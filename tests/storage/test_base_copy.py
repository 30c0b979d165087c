"""A base model comes to a node: found, written, or downloaded from a hub, with progress."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.storage import base_copy
from skyrl_actors.storage.base_copy import BaseCopy, bring, described

NAME, REVISION = "team/model", "c" * 40
FILES = {"config.json": b'{"a": 1}', "model.safetensors": bytes(range(256)) * 4000}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


def test_a_complete_folder_is_left_alone(model: Path):
    before = (model / "config.json").stat().st_mtime_ns
    assert list(bring(described(model, None, is_made_here=True), "n")) == []
    assert (model / "config.json").stat().st_mtime_ns == before


def test_a_missing_folder_is_refused_with_its_node(model: Path):
    copy = described(model, None, is_made_here=False)
    (model / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ConfigError, match=r"model.safetensors is not on node gpu-7 \(1 of 2 files"):
        list(bring(copy, "gpu-7"))


def test_a_model_that_the_service_made_is_written(model: Path, tmp_path: Path):
    copy = described(model, None, is_made_here=True)
    elsewhere = BaseCopy(
        folder=str(tmp_path / "other" / "tiny"), sizes=copy.sizes, contents=copy.contents
    )
    assert list(bring(elsewhere, "n")) == []
    found = {file.name: file.read_bytes() for file in (tmp_path / "other" / "tiny").iterdir()}
    assert found == FILES


class Hub(BaseHTTPRequestHandler):
    """The requests of a snapshot's download."""

    def do_HEAD(self) -> None:
        self._answer(with_content=False)

    def do_GET(self) -> None:
        self._answer(with_content=True)

    def _answer(self, with_content: bool) -> None:
        if self.path.startswith(f"/api/models/{NAME}/tree/"):
            listed = [
                {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                for name, content in FILES.items()
            ]
            content = json.dumps(listed).encode()
        elif self.path.startswith(f"/api/models/{NAME}/"):
            siblings = [{"rfilename": name} for name in FILES]
            content = json.dumps({"id": NAME, "sha": REVISION, "siblings": siblings}).encode()
        elif (name := self.path.rpartition("/")[2]) in FILES and REVISION in self.path:
            content = FILES[name]
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", REVISION)
        self.end_headers()
        if with_content:
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    files = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(base_copy, "LOOK_S", 0.01)
    yield url
    server.shutdown()
    server.server_close()


def in_cache(cache: Path) -> BaseCopy:
    folder = cache / "models--team--model" / base_copy.SNAPSHOTS / REVISION
    sizes = {name: len(content) for name, content in FILES.items()}
    return BaseCopy(folder=str(folder), sizes=sizes, hub_name=NAME)


def test_a_model_of_the_hub_is_downloaded_to_the_same_path_and_revision(hub: str, tmp_path: Path):
    copy = in_cache(tmp_path)
    reports = list(bring(copy, "n"))
    assert reports and all(report.total_bytes == copy.num_bytes for report in reports)
    assert reports[-1].num_bytes == copy.num_bytes
    for name, content in FILES.items():
        assert (Path(copy.folder) / name).read_bytes() == content
    assert described(Path(copy.folder), NAME, is_made_here=False) == copy
    assert list(bring(copy, "n")) == []  # the second time it is there


def test_a_download_that_fails_names_node_and_remedy(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    copy = in_cache(tmp_path)
    lost = BaseCopy(folder=copy.folder, sizes=copy.sizes, hub_name="team/gone")
    with pytest.raises(ConfigError, match=r"(?s)'team/gone' cannot be down.* node n .*HF_HO"):
        list(bring(lost, "n"))


def test_a_folder_outside_of_the_hubs_cache_is_not_downloaded(model: Path):
    assert described(model, NAME, is_made_here=False).hub_name is None
