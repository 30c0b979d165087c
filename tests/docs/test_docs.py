"""Checks of the docs.

Every command is tested, generated tables are current, and the site builds without a network.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_actors.commands import cli_reference as cli_table
from skyrl_actors.config import config_reference as config_table
from skyrl_actors.config.job import JobConfig
from skyrl_actors.config.load import load
from tests.conftest import ROOT, Service, run_cli

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?:<!-- needs: (\w+) -->\n)?^```sh\n(.*?)^```", re.M | re.S)
# Which test runs a command of the docs, as "file: text that the file contains", or why no test runs
# it.
OPERATING = (
    "key limit",
    "key limit ann --tokens-per-day 5000000 --requests-per-minute 600",
    "key limit '*' --open-requests 500",
    "key limit ann --weight 2",
    "usage",
    "usage --by session --csv",
    "sessions",
    "models",
    "requests --tenant ann",
    "failures",
    "logs engine:0 -f",
    "pause",
    "drain",
    "resume",
)
HELD_BY = {
    **{
        f"skyrl-actors {command}": "tests/service/test_operating.py: "
        + f'"{shlex.split(command.removeprefix("key "))[0]}"'
        for command in OPERATING
    },
    "skyrl-actors backup configs/cpu_tiny.yaml backups/monday": (
        "tests/journal/test_backup.py: backup"
    ),
    "skyrl-actors check backups/monday": "tests/journal/test_backup.py: check",
    "tinker-conformance --base-url http://127.0.0.1:8000 --api-key tml-local "
    "--html scorecard.html": "tests/conformance/test_kit.py: main",
    "prometheus --config.file=configs/prometheus/prometheus.yml": (
        "tests/observe/test_metrics.py: prometheus.yml"
    ),
    "make demo": 'tests/jobs/test_commands.py: "demo"',
    "make test": "runs this test",
    "source .venv/bin/activate": "a command of the shell",
    "export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local": (
        "tests/conftest.py: TINKER_BASE_URL"
    ),
    "skyrl-actors serve configs/cpu_tiny.yaml": "tests/conftest.py: configs/cpu_tiny.yaml",
    "skyrl-actors serve configs/cpu_catalogue.yaml": (
        "tests/service/test_several_base_models.py: configs/cpu_catalogue.yaml"
    ),
    "skyrl-actors stop": "tests/conftest.py: stop",
    "skyrl-actors train configs/jobs/grpo_tiny.yaml": "tests/jobs/test_commands.py: train",
    "skyrl-actors train configs/jobs/grpo_tiny_moe.yaml": (
        "tests/jobs/test_commands.py: grpo_tiny_moe.yaml"
    ),
    "skyrl-actors train configs/jobs/ppo_tiny_jax.yaml": (
        "tests/jobs/test_commands.py: ppo_tiny_jax.yaml"
    ),
    "skyrl-actors serve configs/cpu_tiny_jax.yaml": (
        "tests/service/test_jax_service.py: configs/cpu_tiny_jax.yaml"
    ),
    "skyrl-actors logs 2.controller": 'tests/service/test_two_shards.py: "2.controller"',
    "pkill -9 -f ray::TrainWorkerActor": "tests/service/test_faults.py: kill",
    "RAY_AUTH_MODE=token ray job submit --working-dir . -- python -m skyrl_actors train "
    "configs/jobs/ppo_tiny.yaml run.folder=$PWD/runs": "tests/jobs/test_commands.py: submit",
    "RAY_AUTH_MODE=token ray job submit --working-dir . -- python -m skyrl_actors train "
    "configs/jobs/dpo_tiny.yaml job.data.path=$PWD/data/pairs.jsonl run.folder=$PWD/runs": (
        'tests/jobs/on_service.py: "dpo"'
    ),
    "skyrl-actors train my_job.yaml": 'tests/jobs/on_service.py: "dapo"',
    "skyrl-actors train configs/jobs/sft_tiny.yaml": 'tests/jobs/on_service.py: "sft"',
    "skyrl-actors train configs/jobs/sft_shapes.yaml": (
        "tests/jobs/test_commands.py: sft_shapes.yaml"
    ),
    "skyrl-actors train configs/jobs/grpo_shapes.yaml": (
        "tests/jobs/test_commands.py: grpo_shapes.yaml"
    ),
    "skyrl-actors key add ann --expires 30d": 'tests/service/test_stored_keys.py: "add"',
    "skyrl-actors key list": 'tests/service/test_stored_keys.py: "list"',
    "skyrl-actors key rotate ann --grace 24h": 'tests/service/test_stored_keys.py: "rotate"',
    "skyrl-actors key revoke ann": 'tests/service/test_stored_keys.py: "revoke"',
    "skyrl-actors key audit": 'tests/service/test_stored_keys.py: "audit"',
    "skyrl-actors serve configs/cpu_tiny_vl.yaml": "tests/service/test_images.py: CONFIG",
    "python -m examples.vision_sft": "tests/service/test_images.py: examples.vision_sft",
}
SMALLER = {
    "python -m examples.sft": "python -m examples.sft --steps 1 --batch 4 --base-model tiny",
    "python -m examples.ppo_critic": (
        "python -m examples.ppo_critic --iterations 1 --prompts 4 --base-model tiny"
    ),
}
HERE = (
    *SMALLER,
    "python -m examples.make_data data",
    "skyrl-actors status",
    "skyrl-actors journal configs/cpu_tiny.yaml",
    "skyrl-actors trace trace.json",
    "skyrl-actors key line ann",
    "skyrl-actors runs",
    "skyrl-actors report runs/ppo_tiny",
    "skyrl-actors plan configs/colocated_1x8.yaml --nodes cluster.yaml --model "
    "configs/shapes/qwen3-8b",
    "skyrl-actors plan Qwen/Qwen3-1.7B --gpus 1xRTX4090 --model configs/shapes/qwen3-1.7b",
    "skyrl-actors plan configs/shapes/qwen3-8b placement.layout=split engine.max_model_len=8192 "
    "--gpus 2x8xH100",
)
ABSENT = {"gpu", "cluster", "network", "external"}


def commands() -> dict[str, str | None]:
    """Return every command of the docs, and the resource that it needs, if any."""
    found: dict[str, str | None] = {}
    for page in PAGES:
        for needs, block in BLOCK.findall(page.read_text()):
            assert not needs or needs in ABSENT, (page, needs)
            for line in block.splitlines():
                for command in re.sub(r"\s+#.*", "", line).split(" && "):
                    if command.strip():
                        found[command.strip()] = needs or None
    return found


def test_every_command_is_run_by_a_test():
    here = {command for command, needs in commands().items() if needs is None}
    assert here == {*HELD_BY, *HERE}
    for command, held in HELD_BY.items():
        place, _, word = held.partition(": ")
        assert not word or word.split()[-1] in (ROOT / place).read_text(), command


def test_commands_are_only_in_sh_blocks():
    for page in PAGES:
        text = BLOCK.sub("", page.read_text())
        for block in re.findall(r"^```\n(.*?)^```", text, re.M | re.S):
            assert not block.startswith(("skyrl-actors ", "python ", "make ", "ray ", "pip ")), (
                f"{page.name}: mark this block as ```sh\n{block}"
            )


@pytest.mark.parametrize("command", HERE)
def test_commands_of_the_docs(command: str, service: Service, tmp_path: Path):
    words = shlex.split(SMALLER.get(command, command))
    run = tmp_path / "runs/ppo_tiny"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("job: {}\n")
    (run / "metrics.jsonl").write_text('{"step": 0, "eval/accuracy": 0.5}\n')
    for name in ("configs", "cluster.yaml", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    if words[0] == "skyrl-actors":
        own = {
            "status": ["--name", service.name],
            "trace": ["--name", service.name],
            "journal": [f"journal.folder={service.journal}"],
        }
        done = run_cli(*words[1:], *own.get(words[1], []), cwd=tmp_path)
        if (
            "no operations to show yet" in done.stderr
        ):  # no earlier test has trained on this service
            example = shlex.split(SMALLER["python -m examples.sft"])
            subprocess.run([sys.executable, *example[1:]], cwd=ROOT, check=True, timeout=240)
            done = run_cli(*words[1:], *own[words[1]], cwd=tmp_path)
    else:
        done = subprocess.run(
            [sys.executable, *words[1:]], capture_output=True, text=True, timeout=240, cwd=tmp_path
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.strip() and "Traceback" not in done.stderr


def test_commands_report_a_missing_service():
    for words in (["status"], ["trace", "/tmp/never.json"]):
        done = run_cli(*words, "--name", "nobody")
        assert done.returncode == 2 and "no service named 'nobody'" in done.stderr, (
            done.stdout + done.stderr
        )
    done = run_cli("stop", "--name", "nobody")
    assert done.returncode == 0 and "no service named 'nobody' was running here" in done.stdout


def test_generated_tables_match_the_code():
    for file, module in (("config.md", config_table), ("cli.md", cli_table)):
        assert (ROOT / "docs/reference" / file).read_text() == module.markdown(), (
            f"generate it again: python -m {module.__name__} > docs/reference/{file}"
        )


def test_the_config_of_the_tutorial_is_valid(tmp_path: Path):
    text = (ROOT / "docs/tutorials/your_data_and_reward.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.M | re.S)
    (config,) = [block for block in blocks if "name: my_job" in block]
    (tmp_path / "my_job.yaml").write_text(config)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    assert load(tmp_path / "my_job.yaml", (), JobConfig).run.name == "my_job"


def test_the_navigation_lists_every_page():
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert listed == {
        str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")
    }


def test_the_site_builds_and_fetches_nothing(tmp_path: Path):
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) >= len(list((ROOT / "docs").rglob("*.md")))
    for page in pages:
        text = page.read_text()
        assert not re.findall(
            r"<(?:script|img|link)[^>]+(?:src|href)=\"?https?://(?!127\.0\.0\.1)"
            r"[^\" >]+[^>]*rel=\"?(?:stylesheet|preload)",
            text,
        ), page
        assert not re.findall(r"<(?:script|img)[^>]+src=\"?https?:", text), page
