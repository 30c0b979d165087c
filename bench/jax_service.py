"""A service on JAX beside the JAX backend of PyPI's `skyrl`, through the tinker SDK, on the CPU.

    python3.12 -m venv DIR
    DIR/bin/pip install 'skyrl[jax,tinker]==0.3.0' tinker==0.18.0 orjson
    python -m bench.jax_service --skyrl DIR/bin/python [--rounds N] [--prepare-s S]

Both serve the same model (the sizes of the tiny base, random weights) on two cores, one after the
other, with empty caches of programs at first. A client in the environment of `skyrl`, with its
version of the SDK, makes the same calls of both: small forward_backwards (two rows of 32 tokens),
ragged ones (16 rows of 32 to 256 tokens, other lengths in each call), and samples (32 prompts of 16
tokens, 64 tokens each). For the ragged rows both see new lengths in each call, as in real use. Both
compile programs in the first rounds, so medians of the first and of the second half are listed
apart. Ours compiles programs of usual calls at its start, as is its default; the seconds of both
starts are listed.

Prints a table, then one JSON line.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench import train_setup
from bench.harness import ROOT, cli, emit
from bench.jax_passes import TINY

OURS, THEIRS = "skyrl-actors", "skyrl 0.3.0"
PORTS = {OURS: 8141, THEIRS: 8142}
START_S = 300.0
CLIENT = """
import json, random, sys, time
import tinker
from tinker import types

rounds, model = int(sys.argv[1]), sys.argv[2]
random.seed(0)
service = tinker.ServiceClient()
client = service.create_lora_training_client(base_model=model, rank=32)


def datum(length):
    tokens = [random.randrange(2, 256) for _ in range(length + 1)]
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * length}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def timed(work):
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def step(lengths):
    data = [datum(length) for length in lengths]
    client.forward_backward(data, "cross_entropy").result()


def update():
    step([32, 32])
    client.optim_step(types.AdamParams(learning_rate=1e-4)).result()


found = {"first_step": [timed(update)], "small": [], "ragged": [], "sampling": []}
for _ in range(rounds * 3):
    found["small"].append(timed(lambda: step([32, 32])))
tokens = 0
for _ in range(2 * rounds):
    lengths = [random.randint(32, 256) for _ in range(16)]
    found["ragged"].append(timed(lambda: step(lengths)) / sum(lengths))
client.optim_step(types.AdamParams(learning_rate=1e-4)).result()
sampler = client.save_weights_and_get_sampling_client(name="one")
params = types.SamplingParams(max_tokens=64, temperature=1.0, seed=1)


def sample():
    prompts = [[random.randrange(2, 256) for _ in range(16)] for _ in range(32)]
    futures = [
        sampler.sample(types.ModelInput.from_ints(p), num_samples=1, sampling_params=params)
        for p in prompts
    ]
    return sum(len(f.result().sequences[0].tokens) for f in futures)


for _ in range(2 * rounds):
    began = time.perf_counter()
    count = sample()
    found["sampling"].append((time.perf_counter() - began) / count)
print("RESULT", tinker.__version__ if hasattr(tinker, "__version__") else "", json.dumps(found))
"""


@contextmanager
def ours(folder: Path, work: Path, seconds: float) -> Iterator[str]:
    options = (
        f"http.port={PORTS[OURS]}",
        "name=bench-jax",
        "base_model.type=pretrained",
        "base_model.name=tiny",
        f"base_model.path={folder}",
        f"policy.strategy.cache={work / 'programs'}",
        f"policy.strategy.prepare_s={seconds}",
        f"engine.prepare_s={seconds}",
        f"journal.folder={work / 'journal'}",
        f"checkpoint_dir={work / 'checkpoints'}",
        "critic=null",
    )
    os.environ["XDG_CACHE_HOME"] = str(work / "cache")  # of the engine's programs
    cli("serve", "configs/cpu_tiny_jax.yaml", *options)
    try:
        yield "tiny"
    finally:
        cli("stop", "--name", "bench-jax")


@contextmanager
def theirs(python: str, folder: Path, work: Path) -> Iterator[str]:
    # It starts its engine by `uv run`, which looks for a project; this `uv` runs the installed one.
    shim = work / "bin" / "uv"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nwhile [ "$1" != -m ]; do shift; done\n"{python}" "$@"\n')
    shim.chmod(0o755)
    command = [str(shim), "run", "-m", "skyrl.tinker.api"]
    command += ["--base-model", str(folder), "--backend", "jax"]
    command += [
        "--backend-config",
        json.dumps({"max_lora_adapters": 3, "max_lora_rank": 32}),
    ]
    command += ["--port", str(PORTS[THEIRS]), "--database-url", f"sqlite:///{work / 'their.db'}"]
    command += ["--checkpoints-base", str(work / "their-checkpoints")]
    with (work / "their.log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=work,
            stdout=log,
            stderr=log,
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "PATH": f"{shim.parent}:{os.environ['PATH']}",
            },
            start_new_session=True,
        )
        try:
            if not answers(f"http://127.0.0.1:{PORTS[THEIRS]}/api/v1/healthz", process):
                raise SystemExit(f"skyrl ended:\n{(work / 'their.log').read_text()[-2000:]}")
            yield str(folder)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(30)


def answers(url: str, process: subprocess.Popen[Any]) -> bool:
    """Return whether the service answers before its process ends or its time is over."""
    ends = time.monotonic() + START_S
    while time.monotonic() < ends and process.poll() is None:
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return True
        except httpx.HTTPError:
            time.sleep(1)
    return False


def called(python: str, name: str, model: str, rounds: int) -> dict[str, list[float]]:
    environment = {
        **os.environ,
        "TINKER_BASE_URL": f"http://127.0.0.1:{PORTS[name]}",
        "TINKER_API_KEY": "tml-bench",
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [python, "-c", CLIENT, str(rounds), model],
        capture_output=True,
        text=True,
        env=environment,
        timeout=1800,
    )
    if done.returncode:
        raise SystemExit(f"the client of {name} failed:\n{done.stderr[-2000:]}")
    line = next(x for x in done.stdout.splitlines() if x.startswith("RESULT"))
    return json.loads(line[line.index("{") :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--skyrl", required=True, help="the python that has skyrl 0.3.0")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prepare-s", type=float, default=120, help="prepare_s of our service")
    asked = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    found: dict[str, dict[str, list[float]]] = {}
    with train_setup.folder_of(TINY) as folder, tempfile.TemporaryDirectory() as scratch:
        add_tokenizer(folder)
        ways = {
            OURS: lambda work: ours(folder, work, asked.prepare_s),
            THEIRS: lambda work: theirs(asked.skyrl, folder, work),
        }
        for name, way in ways.items():
            work = Path(scratch, name.replace(" ", "-"))
            work.mkdir()
            began = time.perf_counter()
            with way(work) as model:
                started = time.perf_counter() - began
                found[name] = called(asked.skyrl, name, model, asked.rounds)
                found[name]["start"] = [started]
    rows = {
        "start of the service, s": lambda own: own["start"][0],
        "first forward_backward and step, s": lambda own: own["first_step"][0],
        "small forward_backward, s": lambda own: median(own["small"][1:]),
        "ragged rows, first rounds, tokens/s": lambda own: 1 / median(halves(own["ragged"])[0]),
        "ragged rows, later, tokens/s": lambda own: 1 / median(halves(own["ragged"])[1]),
        "sampling, first rounds, tokens/s": lambda own: 1 / median(halves(own["sampling"])[0]),
        "sampling, later, tokens/s": lambda own: 1 / median(halves(own["sampling"])[1]),
    }
    print(f"| | {OURS} | {THEIRS} |\n|---|---|---|")
    for title, figure in rows.items():
        print(f"| {title} | {figure(found[OURS]):.3g} | {figure(found[THEIRS]):.3g} |")
    emit("jax_service", {"prepare_s": asked.prepare_s, "found": found})


def halves(values: list[float]) -> tuple[list[float], list[float]]:
    middle = len(values) // 2
    return values[:middle], values[middle:]


def add_tokenizer(folder: Path) -> None:
    """Write the tiny tokenizer beside the model, which both services load."""
    from skyrl_actors.workers.tiny_base import make_tokenizer

    make_tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    main()
