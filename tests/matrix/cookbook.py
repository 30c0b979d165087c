r"""Run recipes of the tinker cookbook against a service, and print a table of their outcomes.

    skyrl-actors serve configs/cpu_tiny.yaml base_model.name=Qwen/Qwen3-4B-Instruct-2507
    python -m tests.matrix.cookbook --url http://127.0.0.1:8000

A base model that takes images is given to the recipe for images instead:

    skyrl-actors serve configs/cpu_tiny_vl.yaml base_model.name=Qwen/Qwen3-VL-30B-A3B-Instruct
    python -m tests.matrix.cookbook --url http://127.0.0.1:8000 \
        --model Qwen/Qwen3-VL-30B-A3B-Instruct

The recipes are unmodified and run offline. They find tokenizers, renderers and datasets by names of
the Hugging Face hub, and folders of these names in the working directory come first. So they run in
a directory that this module creates. It contains the tokenizer of the service under the name of the
base model, and small artificial datasets. The cookbook is installed in a separate folder, which
comes before this environment's packages.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import datasets
import tinker
import typer
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from skyrl_actors.jobs.shapes import NAMES, shape_tasks

VERSION = "0.6.1"
CACHE = Path.home() / ".cache" / "skyrl-actors" / "cookbook"
# 0.6.1 needs a release that is not on PyPI; only recipes for other model families import it
UNAVAILABLE = "tml-renderers"
EXTRA = "math-rl"
# a name for which the cookbook has a renderer, here one without thinking
MODEL = "Qwen/Qwen3-4B-Instruct-2507"
TAKES_IMAGES = "-VL-"  # in the name of a model
DRAWINGS = "dpdl-benchmark/caltech101"  # the name of a dataset of photos
TRAINED = "skyrl.ai/grad_norm"
ROUNDING = 1e-3  # equal rewards leave about 1e-6 of a gradient
Row = dict[str, Any]

# rl_loop puts these before each question. With them in its training data, the tiny model also
# answers rl_loop's prompts.
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
SPELLED = (
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r "
    "9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}"
)
GSM8K_CARD = (
    "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: "
    "main/train.jsonl\n---\n"
)


@dataclass(frozen=True)
class Recipe:
    name: str
    module: str
    steps: int
    measure: str  # a metric that the recipe writes at each of its steps
    options: tuple[str, ...]
    starts_from: str = ""  # the recipe whose last checkpoint it resumes
    log_option: str = "log_path"
    reaches: tuple[str, float] | None = None  # a metric, and what it must be at the last evaluation


OF_IMAGES = (
    Recipe(
        "vlm_classifier",
        "vlm_classifier.train",
        121,
        "train_mean_nll",
        (
            "dataset=caltech101",
            "renderer_name=qwen3_vl_instruct",
            "learning_rate=4e-3",
            "lora_rank=16",
            "num_epochs=8",
            "n_eval=96",
            "eval_every=40",
            "save_every=100",
        ),
        log_option="experiment_dir",
        reaches=("accuracy", 0.9),
    ),
)
OF_TEXTS = (
    Recipe(
        "sl_loop",
        "sl_loop",
        120,
        "train_mean_nll",
        (
            "batch_size=4",
            "max_length=500",
            "learning_rate=2e-3",
            "train_on_what=last_assistant_message",
            "save_every=50",
        ),
    ),
    # Without this recipe, the tiny model boxes no answer. All rewards would be equal, and rl_loop
    # would never train.
    Recipe(
        "rl_loop",
        "rl_loop",
        3,
        "reward/total",
        (
            "batch_size=4",
            "group_size=16",
            "max_tokens=32",
            "learning_rate=3e-4",
            "loss_fn=importance_sampling",
            "save_every=2",
        ),
        starts_from="sl_loop",
    ),
    Recipe(
        "math_rl",
        "math_rl.train",
        3,
        "env/all/reward/total",
        (
            "env=arithmetic",
            "loss_fn=importance_sampling",
            "groups_per_batch=8",
            "group_size=8",
            "max_tokens=5",
            "save_every=2",
        ),
    ),
    Recipe(
        "chat_sl",
        "chat_sl.train",
        3,
        "train_mean_nll",
        (
            "dataset=no_robots",
            "batch_size=8",
            "max_length=500",
            "learning_rate=1e-3",
            "eval_every=2",
            "save_every=2",
        ),
    ),
)


@dataclass(frozen=True)
class Ran:
    recipe: Recipe
    seconds: float
    steps: int
    first: float
    last: float
    outcome: str  # "ok", or the fault
    output: str

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"


def installed(tools: Sequence[str] = ()) -> Path:
    """Install the cookbook, tools, and what is missing for them here. Return the folder."""
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    folder = CACHE / "-".join((VERSION, *tools, python))
    if not folder.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE, prefix=".partial-") as scratch:
            staging = Path(scratch) / "packages"
            _pip("install", "--no-deps", "--target", str(staging), f"tinker-cookbook=={VERSION}")
            missing = _missing(staging, tools)
            if missing:
                _pip("install", "--no-deps", "--target", str(staging), *missing)
            staging.rename(folder)
    return folder


def _missing(folder: Path, tools: Sequence[str]) -> list[str]:
    """Return exact versions of packages that the cookbook needs and this environment lacks."""
    (cookbook,) = distributions(name="tinker-cookbook", path=[str(folder)])
    needed = [Requirement(text) for text in cookbook.requires or ()]
    wanted = [
        r
        for r in needed
        if r.name != UNAVAILABLE and (r.marker is None or r.marker.evaluate({"extra": EXTRA}))
    ]
    plain = [*(f"{r.name}{r.specifier}" for r in wanted), *tools]
    report = json.loads(_pip("install", "--dry-run", "--report", "-", *plain))
    return [
        f"{item['metadata']['name']}=={item['metadata']['version']}" for item in report["install"]
    ]


def _pip(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments, "-q"], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"tinker-cookbook {VERSION} cannot be installed:\n{done.stderr}")
    return done.stdout


def tokenizer_of(model: str) -> Path:
    """Return the folder of the service's tokenizer, which must be on this machine."""
    served = [
        each.model_name
        for each in tinker.RestClient().get_server_capabilities().result().supported_models
    ]
    if model not in served:
        raise SystemExit(
            f"the service serves {', '.join(map(str, served))}; start it with "
            f"base_model.name={model}"
        )
    with tinker.ServiceClient() as service:
        info = service.create_lora_training_client(model, rank=1).result().get_info()
    folder = Path(str(info.model_data.tokenizer_id))
    if not folder.is_dir():
        raise SystemExit(
            f"the service's tokenizer folder {folder} does not exist on this machine; "
            "set one with --tokenizer"
        )
    return folder


def prepare(work: Path, model: str, tokenizer: Path) -> None:
    """Create the hub names that the recipes use, as folders below `work`."""
    (work / model).parent.mkdir(parents=True, exist_ok=True)
    (work / model).symlink_to(tokenizer.resolve())
    chats = work / "HuggingFaceH4" / "no_robots"
    write_rows(chats / "train.jsonl", [{"messages": _chat(i)} for i in range(480)])
    write_rows(chats / "test.jsonl", [{"messages": _chat(i)} for i in range(16)])
    sums = work / "openai" / "gsm8k"
    write_rows(
        sums / "main" / "train.jsonl",
        [{"question": _question(i), "answer": "#### 4"} for i in range(64)],
    )
    (sums / "README.md").write_text(GSM8K_CARD)
    if TAKES_IMAGES in model:
        _write_drawings(work / DRAWINGS / "data")


def _write_drawings(folder: Path) -> None:
    """Write the splits of a dataset for classification, with drawings of coloured shapes."""
    folder.mkdir(parents=True)
    labels = datasets.ClassLabel(names=[name.replace(" ", "_") for name in NAMES])
    features = datasets.Features({"image": datasets.Image(), "label": labels})
    for split, count, seed in (("train", 1280, 7), ("test", 96, 8)):
        rows = [
            {"image": {"bytes": task.image}, "label": NAMES.index(task.answer)}
            for task in shape_tasks(count, seed)
        ]
        made = datasets.Dataset.from_list(rows, features=features)
        made.to_parquet(str(folder / f"{split}-00000-of-00001.parquet"))


def _question(i: int) -> str:
    return f"{i % 5} + {4 - i % 5}?"


def _chat(i: int) -> list[Row]:
    """Return a chat with the same answer to every question.

    In a minute, two million weights only learn the form of an answer.
    """
    return [
        {"role": "user", "content": "How many r's are in strawberry?" + SUFFIX},
        {"role": "assistant", "content": SPELLED},
        {"role": "user", "content": _question(i) + SUFFIX},
        {"role": "assistant", "content": "\\boxed{4}"},
    ]


def write_rows(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def run(recipe: Recipe, work: Path, packages: Path, model: str, timeout_s: float) -> Ran:
    log = work / "runs" / recipe.name
    if recipe.starts_from:
        _resume_from(work / "runs" / recipe.starts_from, log)
    command = [
        sys.executable,
        "-m",
        f"tinker_cookbook.recipes.{recipe.module}",
        f"model_name={model}",
        f"{recipe.log_option}={log}",
    ]
    command += [f"max_steps={recipe.steps}", *recipe.options]
    environment = {
        **os.environ,
        "PYTHONPATH": str(packages),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "huggingface"),
        "TINKER_TELEMETRY": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    started = time.perf_counter()
    output = work / f"{recipe.name}.txt"
    with output.open("w") as file:
        try:
            done = subprocess.run(
                command,
                cwd=work,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
            )
            ended = "" if done.returncode == 0 else f"it ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"it did not end within {timeout_s:.0f} s"
    return _judge(
        recipe,
        ended,
        [row for file in sorted(log.rglob("metrics.jsonl")) for row in _read_rows(file)],
        time.perf_counter() - started,
        output.read_text(),
    )


def _resume_from(earlier: Path, log: Path) -> None:
    """Prepare a log folder from which a loop resumes.

    Both loops resume at the batch in the last line of its `checkpoints.jsonl`.
    """
    checkpoints = _read_rows(earlier / "checkpoints.jsonl")
    if checkpoints:
        write_rows(log / "checkpoints.jsonl", [{**checkpoints[-1], "batch": 0}])


def _judge(recipe: Recipe, ended: str, rows: list[Row], seconds: float, output: str) -> Ran:
    values = [row[recipe.measure] for row in rows if recipe.measure in row]
    numbers = [
        (name, value)
        for row in rows
        for name, value in row.items()
        if isinstance(value, int | float)
    ]
    broken = sorted({name for name, value in numbers if not math.isfinite(value)})
    if not ended and len(values) != recipe.steps:
        ended = f"{len(values)} of {recipe.steps} steps in metrics.jsonl"
    if not ended and broken:
        ended = f"not finite: {', '.join(broken)}"
    if not ended and not any(row.get(TRAINED, 0) > ROUNDING for row in rows):
        ended = "no step had a gradient"
    if not ended and recipe.reaches is not None:
        name, least = recipe.reaches
        reached = [row[name] for row in rows if name in row]
        if not reached or reached[-1] < least:
            ended = f"{name} {reached[-1] if reached else 'missing'}, below {least}"
    first, last = (values[0], values[-1]) if values else (math.nan, math.nan)
    return Ran(recipe, seconds, len(values), first, last, ended or "ok", output)


def show(ran: list[Ran]) -> None:
    console = Console(width=110)
    table = Table(
        title=f"tinker-cookbook {VERSION}, tinker {tinker.__version__}", title_justify="left"
    )
    for column in ("recipe", "seconds", "steps", "metric, first → last step", "outcome"):
        table.add_column(column, no_wrap=column == "recipe")
    for each in ran:
        measured = f"{each.recipe.measure} {each.first:.3f} → {each.last:.3f}"
        table.add_row(
            each.recipe.name, f"{each.seconds:.0f}", f"{each.steps}", measured, each.outcome
        )
    console.print(table)
    for each in ran:
        if not each.ok:
            tail = "\n".join(each.output.splitlines()[-20:])
            console.print(
                f"{each.recipe.name}: {each.outcome}\n{tail}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )


@contextmanager
def _kept(work: Path) -> Iterator[str]:
    if work.exists() and any(work.iterdir()):
        raise SystemExit(f"{work} is not empty")
    work.mkdir(parents=True, exist_ok=True)
    yield str(work.resolve())


def main(
    url: str = typer.Option("", envvar="TINKER_BASE_URL", help="a running service"),
    model: str = typer.Option(
        MODEL, help="the base model, by a name for which the cookbook has a renderer"
    ),
    tokenizer: Path = typer.Option(
        None, help="folder of the model's tokenizer; default: that of the service"
    ),
    work: Path = typer.Option(
        None,
        help="an empty folder that keeps datasets, metrics and output; default: a temporary one",
    ),
    timeout_s: float = typer.Option(600.0, help="longest time of one recipe"),
) -> None:
    if not url:
        raise SystemExit(
            "no service is given; pass --url http://127.0.0.1:8000, or set TINKER_BASE_URL"
        )
    os.environ["TINKER_BASE_URL"] = url
    os.environ.setdefault("TINKER_API_KEY", "tml-cookbook")
    packages = installed()
    with _kept(work) if work else tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), model, tokenizer or tokenizer_of(model))
        ran = []
        for recipe in OF_IMAGES if TAKES_IMAGES in model else OF_TEXTS:
            print(f"{recipe.name}: {recipe.steps} steps", file=sys.stderr, flush=True)
            ran.append(run(recipe, Path(folder), packages, model, timeout_s))
    show(ran)
    raise typer.Exit(0 if all(each.ok for each in ran) else 1)


if __name__ == "__main__":
    typer.run(main)
