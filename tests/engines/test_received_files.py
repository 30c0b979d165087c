"""Files that engines of one host receive at the same time."""

import threading
from pathlib import Path

import numpy as np
import pytest

from skyrl_actors.engines import received_files


@pytest.mark.parametrize("names", [("",), ("adapter.safetensors", "adapter_config.json")])
def test_engines_of_a_host_write_once(
    names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    written, write_bytes = [], Path.write_bytes

    def counted(path: Path, content: memoryview) -> int:
        written.append(path.name)
        return write_bytes(path, content)

    monkeypatch.setattr(Path, "write_bytes", counted)
    files = {name: np.arange(1000, dtype=np.uint8) for name in names}
    target = tmp_path / "weights" / "m@1"
    engines = [
        threading.Thread(target=received_files.write, args=(target, files)) for _ in range(8)
    ]
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.join(10)
    assert len(written) == len(names)
    for name in names:
        file = target / name if name else target
        assert file.read_bytes() == files[name].tobytes()
    received_files.remove(target)
    assert not target.exists()


def test_a_write_that_failed_leaves_nothing_and_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = {name: np.arange(1000, dtype=np.uint8) for name in ("a", "b")}
    target = tmp_path / "weights" / "m@1"
    write_bytes = Path.write_bytes

    def full(path: Path, content: memoryview) -> int:
        if path.name == "b":
            raise OSError(28, "No space left on device")
        return write_bytes(path, content)

    with monkeypatch.context() as disk:
        disk.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space left"):
            received_files.write(target, files)
    assert [file.name for file in target.parent.iterdir()] == [received_files.LOCK]
    killed = target.with_name(".m@1.77.partial")
    killed.mkdir()
    (killed / "a").write_bytes(b"half")
    received_files.write(target, files)
    assert (target / "b").read_bytes() == files["b"].tobytes() and not killed.exists()
