"""The house rules: who may import whom, where heavy libraries live, how large things may grow."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = {
    "messages": set(),
    "config": {"messages"},
    "losses": {"messages"},
    "colocation": {"messages"},
    "observe": {"messages"},
    "workers": {"files", "private_folders", "device_memory", "config", "messages", "losses", "streams"},
    "streams": {"messages", "device_memory"},
    "device_memory": set(),
    "remote": {"messages"},
    "restarts": {"config"},
    "migrations": set(),
    "journal": {"files", "clock", "messages", "config", "migrations"},
    "groups": {"messages", "config", "workers", "remote", "restarts", "placement", "observe"},
    "transfer": {"messages", "config", "groups", "remote"},
    "engines": {
        "messages",
        "config",
        "colocation",
        "transfer",
        "remote",
        "line",
        "restarts",
        "placement",
        "streams",
        "observe",
        "private_folders",
    },
    "backends": {
        "messages",
        "config",
        "workers",
        "colocation",
        "groups",
        "engines",
        "transfer",
        "remote",
        "placement",
        "observe",
    },
    "line": {"messages", "remote", "frames", "handshake"},
    "frames": {"messages"},
    "handshake": {"messages"},
    "controller": {
        "files",
        "clock",
        "storage",
        "line",
        "remote",
        "messages",
        "config",
        "losses",
        "journal",
        "backends",
        "observe",
    },
    "api": {"messages", "config", "controller", "backends", "losses", "line", "remote", "commands", "observe"},
    "jobs": {"messages", "config", "api", "observe", "storage"},
    "commands": {
        "messages",
        "config",
        "api",
        "backends",
        "controller",
        "jobs",
        "journal",
        "remote",
        "placement",
        "observe",
        "private_folders",
        "__main__",
    },
    "__main__": {"messages", "commands"},
    "placement": set(),
    "files": set(),
    "private_folders": {"messages"},
    "clock": set(),
    "storage": {"messages", "files"},
}
# Single modules that may see less or more than their room.
NARROW = {
    "controller": {"backends": {"skyrl_actors.backends.base", "skyrl_actors.backends.build"}},
    "api": {
        "controller": {"skyrl_actors.controller.tenants", "skyrl_actors.controller.checkpoints"},
        "backends": {"skyrl_actors.backends.base"},
        "commands": {"skyrl_actors.commands.serve"},
        "remote": {"skyrl_actors.remote"},
    },
    "workers": {
        "losses": {"skyrl_actors.losses", "skyrl_actors.losses.base", "skyrl_actors.losses.torch_ops"},
        "config": {"skyrl_actors.config.strategies"},
    },
    "backends": {"workers": {"skyrl_actors.workers.interface", "skyrl_actors.workers.tiny_base"}},
    "groups": {"workers": {"skyrl_actors.workers.interface", "skyrl_actors.workers.torch_worker"}},
}
HEAVY = {
    "torch": ("workers/", "streams.py", "device_memory.py", "losses/torch_ops.py", "losses/torch_graph.py", "engines/worker_ext.py", "engines/vllm_patches.py", "engines/vllm_tempered.py", "jobs/trackers.py",
              "commands/doctor.py"),
    "vllm": ("engines/worker_ext.py", "engines/vllm_patches.py", "engines/vllm_tempered.py", "engines/vllm_engine.py", "engines/vllm_samples.py", "engines/vllm_stats.py"),
    "ray": (
        "api/ingress.py", "api/client.py", "groups/", "engines/pool.py", "engines/engine.py", "engines/member.py", "transfer/", "remote.py", "backends/ray_backend.py", "backends/site.py",
        "backends/exporter.py",
        "commands/cluster.py", "commands/serve.py", "commands/train.py", "placement/reserve.py",
    ),
    "jax": (),
    "sqlalchemy": ("journal/", "migrations/"),
    "alembic": ("journal/", "migrations/"),
}  # fmt: skip
MODULE_LINES, FUNCTION_LINES = 400, 60
SWALLOWING_EXCEPTS = 5  # the gate, the two lanes, shutdown; a thread that hands its error to who waits


def modules() -> list[Path]:
    return sorted([*(ROOT / "skyrl_actors").rglob("*.py"), *(ROOT / "placement").rglob("*.py")])


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "placement" if parts[0] == "placement" else parts[1]


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_rooms_import_only_their_neighbours(path: Path):
    room = room_of(path)
    if room == "__init__":
        return
    for name in imports_of(path):
        parts = name.split(".")
        other = "placement" if parts[0] == "placement" else parts[1] if parts[0] == "skyrl_actors" and len(parts) > 1 else None
        if other is None or other == room:
            continue
        assert other in ROOMS[room], f"{room} may not import {name}"
        allowed = NARROW.get(room, {}).get(other)
        if allowed:
            assert any(name == a or name.startswith(f"{a}.") or a.startswith(f"{name}.") or a == name for a in allowed), (
                f"{room} may import only {sorted(allowed)} of {other}, not {name}"
            )


@pytest.mark.parametrize("library", sorted(HEAVY))
def test_heavy_libraries_have_homes(library: str):
    homes = HEAVY[library]
    for path in modules():
        relative = str(path.relative_to(ROOT)).removeprefix("skyrl_actors/")
        if any(name == library or name.startswith(f"{library}.") for name in imports_of(path)):
            assert relative.startswith(homes) if homes else False, f"{relative} imports {library}"


def test_light_modules_load_no_heavy_library():
    light = (
        "skyrl_actors.controller.controller", "skyrl_actors.controller.actor", "skyrl_actors.api.app", "skyrl_actors.config.load",
        "skyrl_actors.losses", "placement.planner", "skyrl_actors.__main__", "skyrl_actors.commands.serve",
    )  # fmt: skip
    code = f"import sys\n{''.join(f'import {name}{chr(10)}' for name in light)}"
    code += "print([m for m in ('torch', 'vllm', 'jax', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_pure_modules_do_not_load_ray():
    code = (
        "import sys, skyrl_actors.controller.queue, skyrl_actors.colocation.phases, skyrl_actors.config.load, placement.planner\n"
        "print('ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_sizes(path: Path):
    text = path.read_text()
    assert len(text.splitlines()) <= MODULE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno + 1 <= FUNCTION_LINES, f"{node.name} is too long"


def test_folders_are_at_most_two_deep():
    for path in modules():
        assert len(path.relative_to(ROOT).parts) <= 3


def test_few_places_swallow_any_exception():
    count = 0
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ExceptHandler) or isinstance(node.body[-1], ast.Raise):
                continue
            broad = node.type is None or (isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException"))
            count += broad
    assert count <= SWALLOWING_EXCEPTS


def test_every_module_says_what_it_is_for():
    for path in modules():
        if path.name != "__init__.py":
            assert ast.get_docstring(ast.parse(path.read_text())), path
