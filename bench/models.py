"""Which families work: trainer, adapters, full fine-tunes, files and engines, each measured.

    python -m bench.models [--only "Qwen3,gpt-oss"] [--write]

Each family is a tiny random model in float32 on the CPU. Cells are the largest |Δ| of
log-probabilities in nats:

- trainer, full: packed rows against transformers in float64, each row alone. For `full`, the larger
  of that and |Δ| / |gradient|, over all weights.
- attention, MLP, head: an adapter on these layers alone, against merged weights in float64, with
  the gradients as in `full`.
- saved: a full fine-tune, saved and opened by transformers.
- engine, transfer, adapter: vLLM against the trainer, with the base model, after a live update, and
  with an adapter on all layers (without the output layer where vLLM's class has none).
- SDK: `serve FOLDER`, then a default LoRA is created, trained, saved and sampled. No figure.

Prints a Markdown table and one JSON line; `--write` puts the table in docs/reference/models.md.
"""

import argparse
import asyncio
import json
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from bench.harness import ROOT, emit
from bench.served_families import FAMILIES, config_of
from skyrl_actors.engines.interface import BASE_VERSION
from skyrl_actors.engines.logprob_check import SCORING
from skyrl_actors.messages.errors import SkyrlActorsError
from skyrl_actors.messages.model import LoraSpec, ModelSpec
from skyrl_actors.messages.weights import WeightManifest
from skyrl_actors.workers.tiny_base import make_tokenizer
from tests.engines.test_engine_families import PROMPT, saved_model, scored, trained
from tests.engines.test_vllm_start import ENVIRONMENT, engine_for, saved
from tests.service.served_folder import serve_and_train
from tests.workers.references import Reference, batch, relative
from tests.workers.strategy_runs import run
from tests.workers.test_adapter_families import CALL, RANKS, columns_of, reference, state_of
from tests.workers.test_models import LENGTHS, computed, worker_for

PAGE = ROOT / "docs" / "reference" / "models.md"
BEGIN, END = "<!-- bench.models -->", "<!-- end of bench.models -->"
SWITCHES = {"attention": "train_attn", "MLP": "train_mlp", "head": "train_unembed"}
OFF = dict.fromkeys(SWITCHES.values(), False)
COLUMNS = (
    *("trainer", "attention", "MLP", "head", "full", "saved"),
    *("engine", "transfer", "adapter", "SDK"),
)
WORKS = "yes"
Cells = dict[str, float | str]


def attempt(cells: Cells, column: str, work: Callable[[], float | str]) -> None:
    """Fill a cell with a difference, or with why there is none."""
    try:
        cells[column] = work()
    except Exception as error:  # noqa: BLE001  a family may fail in any way; the table says how
        cells[column] = reason(error)


def reason(error: Exception) -> str:
    kind = "refused" if isinstance(error, SkyrlActorsError) else type(error).__name__
    text = re.sub(re.escape(tempfile.gettempdir()) + r"/\S*", "(folder)", str(error))
    return f"{kind}: {' '.join(text.split())[:240]}"


def full(base: Path) -> float:
    worker = worker_for(base)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny"))
    output, wanted, columns = computed(worker, 3), Reference(base), batch(3, LENGTHS)
    wanted.backward("cross_entropy", columns)
    rows = torch.cat(wanted.rows(columns)).detach().numpy()
    state, gradients = state_of(worker, "m"), wanted.gradients()
    assert state.gradients is not None
    found = state.split(state.gradients)
    return max(
        float(np.abs(output.values - rows).max()),
        *(relative(gradient, gradients[key]) for key, gradient in found.items()),
    )


def trainer(base: Path) -> float:
    worker = worker_for(base)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny", lora=LoraSpec(rank=1)))
    rows = torch.cat(Reference(base).rows(batch(3, LENGTHS))).detach().numpy()
    return float(np.abs(computed(worker, 3).values - rows).max())


def adapter(base: Path, switch: str) -> float:
    lora = LoraSpec(rank=RANKS["a"], **OFF | {switch: True})
    worker, _ = trained(base, "a", lora)
    (output,) = run(worker, [("a", columns_of("a"), CALL)])
    state = state_of(worker, "a")
    assert state.gradients is not None
    wanted, gradients = reference(base, worker, "a")
    return max(
        float(np.abs(output.values - wanted.numpy()).max()),
        *(
            relative(gradient, gradients[key])
            for key, gradient in state.split(state.gradients).items()
        ),
    )


def reopened(base: Path, folder: Path) -> float:
    worker, values = trained(base, "full", None)
    saved_model(worker, "full", folder)
    opened: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor([PROMPT[:-1]])
    with torch.no_grad():
        scores = opened.eval()(input_ids=tokens, use_cache=False).logits[0].log_softmax(-1)
    found = scores.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].numpy()
    return float(np.abs(found - values).max())


async def engine(base: Path, folder: Path, updates: bool) -> Cells:
    """Return the cells of the engine. Without `updates`, it takes adapters alone."""
    updated, changed = trained(base, "full", None)
    weights = saved_model(updated, "full", folder / "full")
    cells: Cells = {}
    async with engine_for(base, takes_full_weights=updates) as started:
        heads = (await started.status()).adapts_head
        worker, values = trained(base, "a", LoraSpec(rank=4, train_unembed=heads))
        (manifest,) = saved_model(worker, "a", folder / "a")

        async def difference(
            wanted: np.ndarray, adapter: WeightManifest | None, version: str
        ) -> float:
            found = await started.sample("r", PROMPT, SCORING, adapter, version)
            assert found.prompt_logprobs is not None
            return float(np.abs(found.prompt_logprobs[1:] - wanted).max())

        cells["engine"] = await difference(scored_base(base), None, BASE_VERSION)
        cells["adapter"] = await difference(values, manifest, manifest.version)
        if updates:
            await started.load_full("full@1", weights)
            cells["transfer"] = await difference(changed, None, "full@1")
    return cells


def scored_base(base: Path) -> np.ndarray:
    worker = worker_for(base)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny", lora=LoraSpec(rank=1)))
    return scored(worker, "m")


def measured(family: str) -> Cells:
    cells: Cells = {"family": family}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = saved(config_of(family), folder / "base")
        make_tokenizer().save_pretrained(base)
        attempt(cells, "trainer", lambda: trainer(base))
        if isinstance(cells["trainer"], str):
            return cells
        for column, switch in SWITCHES.items():
            attempt(cells, column, lambda switch=switch: adapter(base, switch))
        attempt(cells, "full", lambda: full(base))
        attempt(cells, "saved", lambda: reopened(base, folder / "saved"))
        for updates in (True, False):
            try:
                cells |= asyncio.run(engine(base, folder / f"engine-{updates}", updates))
                break
            except Exception as error:  # noqa: BLE001  as above
                cells["transfer" if updates else "engine"] = reason(error)
        if isinstance(cells["engine"], float):
            attempt(cells, "SDK", lambda: serve_and_train(base) or WORKS)
    return cells


def table(rows: list[Cells]) -> str:
    """Return the table, and below it the reason of each cell without a figure."""
    head = "| family | " + " | ".join(COLUMNS) + " |"
    lines, notes = [head, "|---" * (len(COLUMNS) + 1) + "|"], list[str]()
    for cells in rows:
        shown: list[str] = []
        for column in COLUMNS:
            value = cells.get(column, "")
            if isinstance(value, str) and value not in ("", WORKS):
                if value not in notes:
                    notes.append(value)
                value = f"no ({notes.index(value) + 1})"
            shown.append(value if isinstance(value, str) else f"{value:.0e}")
        lines.append(f"| {cells['family']} | " + " | ".join(shown) + " |")
    return "\n".join([*lines, "", *(f"{i}. {note}" for i, note in enumerate(notes, 1))])


def write(text: str) -> None:
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(FAMILIES), help="names of families")
    parser.add_argument("--write", action="store_true", help="put the table in the docs")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "ERROR"})
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    rows: list[Cells] = []
    for family in FAMILIES:
        if family in arguments.only.split(","):
            rows.append(measured(family))
            print(json.dumps(rows[-1]), flush=True)
    text = table(rows)
    print(text)
    if arguments.write:
        write(text)
    emit("models", {"rows": rows})


if __name__ == "__main__":
    main()
