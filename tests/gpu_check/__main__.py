"""Run the checks with the CUDA builds. vLLM loads the driver's library, so a stub may stand in.

Every function of the stub returns CUDA_ERROR_NO_DEVICE.
"""

import ctypes
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

DRIVER = "libcuda.so.1"
OTHER_LIBRARIES = ("cublas", "cusolver", "cusparse", "cufft", "curand", "cudnn", "cuda")
NO_DEVICE = 100
FOLDER = Path(__file__).parent


def main() -> None:
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        if not _has_driver():
            _build_stub(Path(scratch))
            paths = [scratch, environment.get("LD_LIBRARY_PATH", "")]
            environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, paths))
            environment["CUDA_VISIBLE_DEVICES"] = ""  # Triton then accepts that no GPU is there
        command = [sys.executable, "-m", "pytest", "--noconftest", "-o", "addopts=", "-q"]
        sys.exit(subprocess.run([*command, str(FOLDER), *sys.argv[1:]], env=environment).returncode)


def _has_driver() -> bool:
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True


def _build_stub(folder: Path) -> None:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        sys.exit("vllm is not installed here; run make gpu-check")
    source = "".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in _used(spec.origin))
    (folder / "stub.c").write_text(source)
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{DRIVER}", "-o", str(folder / DRIVER)]
    subprocess.run([*command, str(folder / "stub.c")], check=True)


def _used(origin: str) -> list[str]:
    """Return the functions of the driver that vLLM's libraries name."""
    found: set[str] = set()
    for library in Path(origin).parent.glob("*.so"):
        symbols = re.findall(rb"\bcu[A-Z][A-Za-z0-9]*(?:_v\d+)?\b", library.read_bytes())
        found |= {symbol.decode() for symbol in symbols}
    return sorted(name for name in found if not name.startswith(OTHER_LIBRARIES))


if __name__ == "__main__":
    main()
