"""Rows with images: packed with others and of several tenants, against transformers alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText

from skyrl_actors import losses
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.messages.images import PlacedImage
from skyrl_actors.messages.model import AdamParams, LoraSpec, ModelSpec
from skyrl_actors.workers import vision, vision_proof
from skyrl_actors.workers.interface import PartCall, Refused, WorkerSpec
from skyrl_actors.workers.torch_worker import TorchWorker
from skyrl_actors.workers.vision import positions_of
from tests.workers import vision_models
from tests.workers.vision_models import MERGE, MODELS, TOKENS, batch

CALL = losses.find("cross_entropy").checked({})
ROWS = (
    (3, (1, 4, 6), 5),
    (7,),
    (2, (1, 4, 4), 3, (1, 8, 4), 4),
    ((1, 6, 4), 6),
    (9,),
)


@pytest.fixture(scope="module", params=MODELS)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_models.make(request.param, tmp_path_factory.mktemp(request.param))


def worker_on(base: Path, dtype: str = "float64", **options: Any) -> TorchWorker:
    worker = TorchWorker(
        WorkerSpec(
            role="policy",
            rank=0,
            world_size=1,
            base_folder=str(base),
            dtype=dtype,
            device="cpu",
            num_threads=1,
            collective_timeout_s=60.0,
            **{"microbatch_tokens": 4096} | options,
        )
    )
    worker.setup("127.0.0.1", 0)
    return worker


def created(worker: TorchWorker, name: str, lora: LoraSpec | None) -> None:
    worker.create_model(ModelSpec(model_id=name, base_model="tiny", lora=lora, seed=len(name)))


def passed(worker: TorchWorker, name: str, columns: Columns, forward_only: bool = True) -> Any:
    call = PartCall(model_id=name, rows=tuple(range(columns.num_rows)), columns=columns, loss=CALL)
    (found,) = worker.forward_backward((call,), forward_only)
    return found


def by_transformers(model: Any, columns: Columns) -> list[torch.Tensor]:
    """Return the logprobs of each row, computed alone by transformers' own forward."""
    found = []
    for row in range(columns.num_rows):
        start, stop = columns.offsets[row : row + 2]
        tokens = torch.from_numpy(columns.tokens[start:stop].astype(np.int64))[None]
        images = list(columns.images_of(row))
        given: dict[str, Any] = {}
        if images:
            pixels = np.concatenate([image.pixels for image in images])
            given = {
                "pixel_values": torch.from_numpy(pixels),
                "image_grid_thw": torch.tensor([image.grid for image in images]),
                "mm_token_type_ids": (tokens == TOKENS["image_token_id"]).int(),
            }
        logits = model(input_ids=tokens, use_cache=False, **given).logits[0]
        targets = torch.from_numpy(columns.fields["target_tokens"][start:stop].astype(np.int64))
        found.append(logits.log_softmax(-1).gather(1, targets[:, None])[:, 0])
    return found


def reference(base: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(
        base, dtype=torch.float64, attn_implementation="eager"
    )


@pytest.mark.parametrize("budget", [4096, 24])
def test_packed_rows_with_images_equal_each_alone(base: Path, budget: int):
    worker, columns = worker_on(base, microbatch_tokens=budget), batch(0, ROWS)
    created(worker, "m", LoraSpec(rank=4))
    wanted = torch.cat(by_transformers(reference(base), columns)).detach().numpy()
    found = passed(worker, "m", columns).values
    assert np.abs(found - wanted).max() < 1e-6  # results are float32


def test_gradients_with_images_equal_those_of_transformers(base: Path):
    """Of a full fine-tune, so of every weight of the language model; the tower has none."""
    worker, columns = worker_on(base), batch(1, ROWS)
    created(worker, "m", None)
    passed(worker, "m", columns, forward_only=False)
    model = reference(base)
    (-torch.cat(by_transformers(model, columns)).sum()).backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    state: Any = worker.models["m"].state
    own = state.split(state.saved_gradients())
    assert own and not any("visual" in name for name in own)
    assert {name for name in wanted if "visual" not in name} == own.keys()
    for name, gradient in own.items():
        scale = float(wanted[name].norm()) or 1.0
        assert float((gradient - wanted[name]).norm()) / scale < 1e-5, name


@pytest.mark.parametrize("form", ["adapter", "merged", "full"])
def test_exports_open_in_the_class_for_images(base: Path, tmp_path: Path, form: str):
    worker, columns = worker_on(base, "float32"), batch(5, ROWS)
    created(worker, "m", None if form == "full" else LoraSpec(rank=4))
    passed(worker, "m", columns, forward_only=False)
    worker.optim_step("m", AdamParams(learning_rate=0.01))
    folder = tmp_path / "saved"
    worker.save_checkpoint("m", str(folder), "merged" if form == "merged" else "weights", "s")
    if form == "adapter":
        model = PeftModel.from_pretrained(reference(base), folder)
    else:
        model = reference(folder)
    wanted = torch.cat(by_transformers(model, columns)).detach().numpy()
    assert np.abs(passed(worker, "m", columns).values - wanted).max() < 1e-4


@pytest.mark.parametrize("form", ["adapter", "full"])
def test_a_checkpoint_is_loaded_again(base: Path, tmp_path: Path, form: str):
    columns, step = batch(6, ROWS), AdamParams(learning_rate=0.01)

    def trained(worker: TorchWorker) -> float:
        passed(worker, "m", columns, forward_only=False)
        return worker.optim_step("m", step)["skyrl.ai/grad_norm"]

    lora = LoraSpec(rank=4) if form == "adapter" else None
    first, second = worker_on(base, "float32"), worker_on(base, "float32")
    for worker in (first, second):
        created(worker, "m", lora)
    trained(first)
    first.save_checkpoint("m", str(tmp_path / "saved"), "training", "s")
    second.load_checkpoint("m", str(tmp_path / "saved"), True)
    assert trained(first) == trained(second)


def test_positions_are_those_of_transformers():
    config = MODELS["qwen3_vl"]
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    model: Any = Qwen3VLModel(config)
    for row in ROWS:
        tokens, images, at = list[int](), [], 0
        for part in row:
            count = part if isinstance(part, int) else vision_models.num_tokens(part)
            tokens += [3 if isinstance(part, int) else TOKENS["image_token_id"]] * count
            if not isinstance(part, int):
                images.append((at, part))
            at += count
        ids = torch.tensor([tokens])
        grids = torch.tensor([grid for _, grid in images]) if images else None
        kinds = (ids == TOKENS["image_token_id"]).int()
        wanted, _ = model.get_rope_index(ids, kinds, image_grid_thw=grids)
        assert (positions_of(len(tokens), images, MERGE) == wanted[:, 0].numpy()).all()


def test_two_tenants_with_images_share_a_pass(base: Path):
    """Weights after steps are those of each tenant alone, to rounding."""

    def trained(names: tuple[str, ...]) -> dict[str, np.ndarray]:
        worker = worker_on(base, "float32")
        columns = {"a": batch(2, ROWS[:3]), "bb": batch(3, ROWS[2:])}
        for name in names:
            created(worker, name, LoraSpec(rank=4))
        for _ in range(3):
            calls = tuple(
                PartCall(
                    model_id=name,
                    rows=tuple(range(columns[name].num_rows)),
                    columns=columns[name],
                    loss=CALL,
                )
                for name in names
            )
            worker.forward_backward(calls, False)
            for name in names:
                worker.optim_step(name, AdamParams(learning_rate=1e-2))
        return {name: passed(worker, name, columns[name]).values for name in names}

    together = trained(("a", "bb"))
    for name, values in together.items():
        assert np.abs(values - trained((name,))[name]).max() < 1e-4


def test_a_base_without_a_tower_refuses_images(random_base: Path):
    worker = worker_on(random_base, "float32")
    created(worker, "m", LoraSpec(rank=4))
    found = passed(worker, "m", batch(7, ROWS), forward_only=False)
    assert isinstance(found, Refused) and "takes no images" in str(found.error)


@pytest.mark.parametrize("fault", ["positions", "places", "neighbour"])
def test_a_base_that_would_be_computed_wrongly_is_refused(
    base: Path, monkeypatch: pytest.MonkeyPatch, fault: str
):
    if fault == "positions":
        monkeypatch.setattr(
            vision_proof, "positions_of", lambda n, *_: np.arange(n)[None].repeat(3, 0)
        )
    elif fault == "places":
        monkeypatch.setattr(vision.Placed, "into", lambda self, embedded: (embedded, {}))
    else:
        own = vision.VisionTower.features

        def mixed(self: vision.VisionTower, image: PlacedImage) -> vision.Features:
            found = own(self, image)
            moved = found.embedded + sum(float(each.embedded.sum()) for each in self._kept.values())
            return vision.Features(moved, found.of_layers)

        monkeypatch.setattr(vision.VisionTower, "features", mixed)
    with pytest.raises(ConfigError, match="rows with images differ from each row alone"):
        worker_on(base, "float32")


@pytest.mark.parametrize("activations", ["recompute", "offload"])
def test_other_ways_to_keep_activations_change_no_number(base: Path, activations: str):
    columns = batch(4, ROWS)
    norms = []
    for kind in ("keep", activations):
        worker = worker_on(base, "float32", activations=kind)
        created(worker, "m", LoraSpec(rank=4))
        passed(worker, "m", columns, forward_only=False)
        norms.append(worker.optim_step("m", AdamParams(learning_rate=0.01))["skyrl.ai/grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
