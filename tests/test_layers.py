"""Rules of the code base: allowed imports, places of heavy libraries, and limits of size."""

import ast
import io
import subprocess
import sys
import tokenize
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES: dict[str, set[str]] = {
    "messages": set(),
    "config": {"messages"},
    "losses": {"messages"},
    "colocation": {"messages", "supervision"},
    "observe": {"messages"},
    "workers": {"config", "losses", "messages", "storage", "transport"},
    "jax_workers": {"config", "messages", "storage", "transport", "workers"},
    "transport": {"messages", "remote"},
    "remote": {"messages"},
    "supervision": {"config", "messages", "remote"},
    "migrations": set(),
    "journal": {"clock", "config", "messages", "migrations", "storage"},
    "groups": {
        "config",
        "fair_queue",
        "jax_workers",
        "messages",
        "observe",
        "placement",
        "remote",
        "supervision",
        "workers",
    },
    "transfer": {"config", "groups", "messages", "remote", "storage"},
    "engines": {
        "workers",
        "colocation",
        "config",
        "groups",
        "jax_workers",
        "losses",
        "messages",
        "observe",
        "placement",
        "remote",
        "storage",
        "supervision",
        "transfer",
        "transport",
    },
    "backends": {
        "colocation",
        "config",
        "engines",
        "groups",
        "messages",
        "observe",
        "placement",
        "remote",
        "storage",
        "transfer",
        "workers",
    },
    "controller": {
        "backends",
        "clock",
        "config",
        "fair_queue",
        "fair_slots",
        "heap",
        "journal",
        "losses",
        "messages",
        "observe",
        "remote",
        "storage",
        "transport",
    },
    "api": {
        "backends",
        "commands",
        "config",
        "controller",
        "fair_slots",
        "heap",
        "losses",
        "messages",
        "observe",
        "part_logs",
        "remote",
        "storage",
        "transport",
    },
    "jobs": {"api", "config", "messages", "observe", "storage"},
    "commands": {
        "__main__",
        "api",
        "backends",
        "config",
        "controller",
        "jobs",
        "journal",
        "messages",
        "observe",
        "part_logs",
        "placement",
        "remote",
        "sizing",
        "storage",
        "torchvision_cpu",
    },
    "sizing": {"backends", "config", "messages", "placement"},
    "__main__": {"commands", "messages"},
    "placement": set(),
    "storage": {"messages"},
    "clock": set(),
    "fair_queue": set(),
    "fair_slots": {"fair_queue"},
    "heap": set(),
    "part_logs": {"messages", "remote"},
    "torchvision_cpu": set(),
}
# Packages that may import only some modules of another package.
NARROW = {
    "colocation": {"supervision": {"skyrl_actors.supervision.backoff"}},
    "controller": {"backends": {"skyrl_actors.backends.backend", "skyrl_actors.backends.build"}},
    "api": {
        "controller": {
            "skyrl_actors.controller.calls",
            "skyrl_actors.controller.standby",
            "skyrl_actors.controller.checkpoints",
            "skyrl_actors.controller.tenants",
        },
        "backends": {"skyrl_actors.backends.backend"},
        "commands": {"skyrl_actors.commands.serve"},
        "remote": {"skyrl_actors.remote"},
    },
    "engines": {
        "losses": {"skyrl_actors.losses.truncation"},
        "workers": {"skyrl_actors.workers.pixels"},
        "jax_workers": {
            "skyrl_actors.jax_workers.draws",
            "skyrl_actors.jax_workers.generator",
            "skyrl_actors.jax_workers.loading",
            "skyrl_actors.jax_workers.prepare_sampling",
        },
    },
    "workers": {
        "losses": {
            "skyrl_actors.losses",
            "skyrl_actors.losses.loss",
            "skyrl_actors.losses.processing",
            "skyrl_actors.losses.torch_ops",
            "skyrl_actors.losses.truncation",
        },
        "config": {"skyrl_actors.config.strategies"},
    },
    "backends": {"workers": {"skyrl_actors.workers.interface", "skyrl_actors.workers.tiny_base"}},
    "groups": {
        "jax_workers": {"skyrl_actors.jax_workers.worker"},
        "workers": {"skyrl_actors.workers.interface", "skyrl_actors.workers.torch_worker"},
    },
}
HEAVY = {
    "torch": (
        "workers/",
        "jax_workers/",
        "transport/streams.py",
        "transport/device_memory.py",
        "transport/host_share.py",
        "transport/mxfp4.py",
        "losses/torch_ops.py",
        "losses/torch_graph.py",
        "losses/truncation.py",
        "engines/cpu_worker.py",
        "engines/cpu_experts.py",
        "engines/cpu_mxfp4.py",
        "engines/cpu_rotary.py",
        "engines/hand_copies.py",
        "engines/lora_wrappers.py",
        "engines/split_projections.py",
        "engines/worker_ext.py",
        "engines/vllm_patches.py",
        "engines/vllm_processed.py",
        "jobs/recorder.py",
        "commands/doctor.py",
        "torchvision_cpu.py",
    ),
    "vllm": (
        "engines/cpu_worker.py",
        "engines/cpu_experts.py",
        "engines/cpu_mxfp4.py",
        "engines/cpu_rotary.py",
        "engines/cpu_routes.py",
        "engines/hand_copies.py",
        "engines/lora_wrappers.py",
        "engines/split_projections.py",
        "engines/tool_calls.py",
        "engines/worker_ext.py",
        "engines/vllm_patches.py",
        "engines/vllm_processed.py",
        "engines/engine_args.py",
        "engines/vllm_engine.py",
        "engines/vllm_adapters.py",
        "engines/vllm_samples.py",
        "engines/vllm_prompts.py",
        "engines/vllm_stats.py",
    ),
    "ray": (
        "api/deployment.py",
        "api/ingress.py",
        "api/client.py",
        "groups/",
        "engines/build.py",
        "engines/engine_site.py",
        "engines/rank_with_engine.py",
        "engines/pool.py",
        "engines/local_engine.py",
        "engines/replica.py",
        "transfer/",
        "remote.py",
        "backends/node_bases.py",
        "backends/ray_backend.py",
        "backends/site.py",
        "backends/slots.py",
        "backends/training_parts.py",
        "backends/exporter.py",
        "commands/cluster.py",
        "part_logs.py",
        "commands/one_service.py",
        "commands/serve.py",
        "commands/train.py",
        "commands/upgrade.py",
        "placement/reserve.py",
    ),
    "jax": ("jax_workers/",),
    "sqlalchemy": ("journal/", "migrations/"),
    "alembic": ("journal/", "migrations/"),
}
MODULE_TOKENS, FUNCTION_LINES = 2600, 60
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
SWALLOWING_EXCEPTS = (
    # the state lock, two lanes, shutdown, and a thread that passes its error to the waiting caller
    5
)


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


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "placement" if parts[0] == "placement" else parts[1]


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_packages_import_only_allowed_packages(path: Path):
    package = package_of(path)
    if package == "__init__":
        return
    for name in imports_of(path):
        parts = name.split(".")
        other = (
            "placement"
            if parts[0] == "placement"
            else parts[1]
            if parts[0] == "skyrl_actors" and len(parts) > 1
            else None
        )
        if other is None or other == package:
            continue
        assert other in PACKAGES[package], f"{package} may not import {name}"
        allowed = NARROW.get(package, {}).get(other)
        if allowed:
            assert any(
                name == a or name.startswith(f"{a}.") or a.startswith(f"{name}.") or a == name
                for a in allowed
            ), f"{package} may import only {sorted(allowed)} of {other}, not {name}"


@pytest.mark.parametrize("library", sorted(HEAVY))
def test_heavy_libraries_are_imported_only_where_allowed(library: str):
    places = HEAVY[library]
    for path in modules():
        relative = str(path.relative_to(ROOT)).removeprefix("skyrl_actors/")
        if any(name == library or name.startswith(f"{library}.") for name in imports_of(path)):
            assert relative.startswith(places) if places else False, f"{relative} imports {library}"


def test_light_modules_load_no_heavy_library():
    light = (
        "skyrl_actors.controller.controller",
        "skyrl_actors.controller.actor",
        "skyrl_actors.api.app",
        "skyrl_actors.config.load",
        "skyrl_actors.losses",
        "placement.planner",
        "skyrl_actors.__main__",
        "skyrl_actors.commands.serve",
    )
    code = f"import sys\n{''.join(f'import {name}{chr(10)}' for name in light)}"
    code += "print([m for m in ('torch', 'vllm', 'jax', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_pure_modules_do_not_load_ray():
    code = (
        "import sys, skyrl_actors.controller.queue, skyrl_actors.colocation.phases, "
        "skyrl_actors.config.load, placement.planner\nprint('ray' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "False"
    )


def test_no_modules_import_each_other_in_a_circle():
    """Imports inside functions count too."""
    files = {module_of(path): path for path in modules()}
    graph = {name: project_imports(path, files) - {name} for name, path in files.items()}
    assert list(TopologicalSorter(graph).static_order())


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def project_imports(path: Path, files: dict[str, Path]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in files else node.module for name in names}
    return found & files.keys()


def tokens_in(text: str) -> int:
    """Return the number of tokens of code, without comments and line ends."""
    return sum(
        token.type not in LAYOUT for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_and_functions_are_within_size_limits(path: Path):
    text = path.read_text()
    assert tokens_in(text) <= MODULE_TOKENS
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            assert lines <= FUNCTION_LINES, f"{node.name} is too long"


def test_folders_are_at_most_two_deep():
    for path in modules():
        is_verb = path.is_relative_to(ROOT / "skyrl_actors/controller/verbs")
        assert len(path.relative_to(ROOT).parts) <= (4 if is_verb else 3)


def test_few_places_swallow_any_exception():
    count = 0
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ExceptHandler) or isinstance(node.body[-1], ast.Raise):
                continue
            broad = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            )
            count += broad
    assert count <= SWALLOWING_EXCEPTS


def test_every_module_has_a_docstring():
    for path in modules():
        if path.name != "__init__.py":
            assert ast.get_docstring(ast.parse(path.read_text())), path


TENSOR_LIBRARIES = {"jax", "torch", "vllm", "transformers", "peft", "deepspeed"}


def test_modules_without_tensor_libraries_are_type_checked_strictly():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    strict = [Path(entry) for entry in project["tool"]["pyright"]["strict"]]
    for path in modules():
        name = path.relative_to(ROOT)
        is_strict = any(name.is_relative_to(entry) for entry in strict)
        is_empty = tokens_in(path.read_text()) <= 1  # only a docstring
        roots = {imported.partition(".")[0] for imported in imports_of(path)}
        assert is_strict or is_empty or roots & TENSOR_LIBRARIES, f"{name}: add it to `strict`"
