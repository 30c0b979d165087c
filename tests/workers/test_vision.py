"""Rows with images: packed with others and of several tenants, against transformers alone."""

import json
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText, Gemma3Config

from skyrl_actors import losses
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.errors import ConfigError, InternalError, InvalidRequest
from skyrl_actors.messages.image_form import form_in
from skyrl_actors.messages.images import PlacedImage
from skyrl_actors.messages.model import AdamParams, LoraSpec, ModelSpec
from skyrl_actors.workers import vision, vision_proof
from skyrl_actors.workers.interface import PartCall, Refused, WorkerSpec
from skyrl_actors.workers.pixels import ImagePixels
from skyrl_actors.workers.torch_worker import TorchWorker
from skyrl_actors.workers.vision import positions_of
from tests.workers import family_runs, strategy_runs, vision_models
from tests.workers.ranks import Ranks
from tests.workers.strategy_runs import STRATEGIES
from tests.workers.vision_models import MERGE, MODELS, TOKENS, batch

CALL = losses.find("cross_entropy").checked({})
ROWS = (
    (3, (1, 4, 6), 5),
    (7,),
    (2, (1, 4, 4), 3, (1, 8, 4), 4),
    ((1, 6, 4), 6),
    (9,),
)


FAST = ("qwen3_vl", "qwen2_5_vl")
KINDS = [pytest.param(kind, marks=() if kind in FAST else pytest.mark.slow) for kind in MODELS]


@pytest.fixture(scope="module", params=KINDS)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_models.make(request.param, tmp_path_factory.mktemp(request.param))


def worker_on(base: Path, dtype: str = "float64", **options: Any) -> TorchWorker:
    worker = TorchWorker(
        WorkerSpec(
            rank=0,
            world_size=1,
            base_folder=str(base),
            dtype=dtype,
            device="cpu",
            num_threads=1,
            collective_timeout_s=60.0,
            **{"microbatch_tokens": 4096, "role": "policy"} | options,
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
            processor = ImagePixels(model.config.name_or_path)
            pixels = np.concatenate([processor.of(image.content)[0] for image in images])
            given = {
                "pixel_values": torch.from_numpy(pixels),
                "image_grid_thw": torch.tensor([image.grid for image in images]),
                "mm_token_type_ids": (tokens == TOKENS["image_token_id"]).int(),
            }
        logits = model(input_ids=tokens, use_cache=False, **given).logits[0]
        targets = torch.from_numpy(columns.fields["target_tokens"][start:stop].astype(np.int64))
        found.append(logits.log_softmax(-1).gather(1, targets[:, None])[:, 0])
    return found


def is_linear(base: Path) -> bool:
    """Return whether the model has layers of linear attention."""
    return "linear_attention" in (base / "config.json").read_text()


def has_experts(base: Path) -> bool:
    return "num_experts" in (base / "config.json").read_text()


def widest(base: Path) -> str:
    """Return the dtype with the most digits that a worker computes this model in."""
    return "float32" if has_experts(base) else "float64"


def reference(base: Path) -> Any:
    # The grouped product of experts is not there in float64.
    experts = {"experts_implementation": "eager"} if has_experts(base) else {}
    return AutoModelForImageTextToText.from_pretrained(
        base, dtype=torch.float64, attn_implementation="eager", **experts
    )


@pytest.mark.parametrize("budget", [4096, 24])
def test_packed_rows_with_images_equal_each_alone(base: Path, budget: int):
    worker, columns = worker_on(base, widest(base), microbatch_tokens=budget), batch(0, ROWS)
    created(worker, "m", LoraSpec(rank=4))
    wanted = torch.cat(by_transformers(reference(base), columns)).detach().numpy()
    found = passed(worker, "m", columns).values
    # Results are float32.
    assert np.abs(found - wanted).max() < (1e-5 if has_experts(base) else 1e-6)


def test_gradients_with_images_equal_those_of_transformers(base: Path):
    """Of a full fine-tune, so of every weight of the language model; the tower has none."""
    worker, columns = worker_on(base, widest(base)), batch(1, ROWS)
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
        # The recurrence of linear attention computes in float32 in the reference too.
        bound = 1e-4 if is_linear(base) or has_experts(base) else 1e-5
        assert float((gradient - wanted[name]).norm()) / scale < bound, name


def with_tower(worker: TorchWorker, name: str = "m") -> None:
    spec = ModelSpec(model_id=name, base_model="tiny", train_tower=True)
    worker.create_model(spec)


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_gradients_of_a_trained_tower_equal_those_of_transformers(base: Path, activations: str):
    """Two calls add up, with a forward pass between them."""
    worker, first, second = worker_on(base, widest(base), activations=activations), ROWS, ROWS[:3]
    calls = batch(1, first), batch(2, second)
    with_tower(worker)
    for columns in calls:
        passed(worker, "m", columns, forward_only=False)
        passed(worker, "m", columns)
    model = reference(base)
    for columns in calls:
        (-torch.cat(by_transformers(model, columns)).sum()).backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    state: Any = worker.models["m"].state
    own = state.split(state.saved_gradients())
    assert own.keys() == wanted.keys() and sum("visual" in name for name in own) > 20
    for name, gradient in own.items():
        scale = float(wanted[name].norm()) or 1.0
        bound = 1e-4 if is_linear(base) or has_experts(base) else 1e-5
        assert float((gradient - wanted[name]).norm()) / scale < bound, name


def test_a_trained_tower_computes_with_its_own_weights_alone(base: Path, tmp_path: Path):
    """An adapter beside it keeps the tower of the base, and pixels are the only thing kept."""
    worker, columns, step = worker_on(base, "float32"), batch(3, ROWS), AdamParams()
    created(worker, "a", LoraSpec(rank=4))
    with_tower(worker)
    before = passed(worker, "a", columns).values
    for _ in range(2):
        passed(worker, "m", columns, forward_only=False)
        worker.optim_step("m", replace(step, learning_rate=0.01))
        assert (passed(worker, "a", columns).values == before).all()
    folder = tmp_path / "saved"
    worker.save_checkpoint("m", str(folder), "training", "s")
    own = passed(worker, "m", columns).values
    wanted = torch.cat(by_transformers(reference(folder), columns)).detach().numpy()
    assert np.abs(own - wanted).max() < 1e-4 < np.abs(own - before).max()
    first, second = worker, worker_on(base, "float32")
    with_tower(second)
    second.load_checkpoint("m", str(folder), True)
    norms = []
    for each in (first, second):
        passed(each, "m", columns, forward_only=False)
        norms.append(each.optim_step("m", step)["skyrl.ai/grad_norm"])
    assert norms[0] == norms[1]


def test_a_frozen_tower_is_saved_and_loaded_beside_a_trained_one(base: Path, tmp_path: Path):
    """The trained one's weights are those that the network computes with now."""
    worker, columns = worker_on(base, "float32"), batch(5, ROWS)
    created(worker, "frozen", None)
    with_tower(worker)
    wanted = passed(worker, "frozen", columns).values
    passed(worker, "m", columns, forward_only=False)
    worker.optim_step("m", AdamParams(learning_rate=0.01))
    passed(worker, "m", columns)
    worker.save_checkpoint("frozen", str(tmp_path / "saved"), "weights", "s")
    found = torch.cat(by_transformers(reference(tmp_path / "saved"), columns)).detach().numpy()
    assert np.abs(found - wanted).max() < 1e-4
    worker.load_checkpoint("frozen", str(tmp_path / "saved"), False)
    assert np.abs(passed(worker, "frozen", columns).values - wanted).max() < 1e-6


def test_a_snapshot_has_a_trained_tower(base: Path, tmp_path: Path):
    columns, weights = batch(4, ROWS), []
    first, second = worker_on(base, "float32"), worker_on(base, "float32")
    with_tower(first)
    spec = first.models["m"].spec
    passed(first, "m", columns, forward_only=False)
    first.optim_step("m", AdamParams())
    passed(first, "m", columns, forward_only=False)  # a pending gradient
    first.write_state(first.copy_state("m").handle, str(tmp_path))
    second.restore_state(spec, str(tmp_path))
    for worker in (first, second):
        worker.optim_step("m", AdamParams())
        state: Any = worker.models["m"].state
        weights.append(state.weights.clone())
    assert torch.equal(weights[0], weights[1])
    with pytest.raises(InternalError, match=r"weights has .* numbers, and the model has"):
        second.restore_state(replace(spec, train_tower=False), str(tmp_path))


def test_a_checkpoint_with_another_tower_is_refused_where_it_would_be_dropped(
    base: Path, tmp_path: Path
):
    worker, columns, folder = worker_on(base, "float32"), batch(6, ROWS), tmp_path / "saved"
    with_tower(worker)
    passed(worker, "m", columns, forward_only=False)
    worker.optim_step("m", AdamParams(learning_rate=0.01))
    worker.save_checkpoint("m", str(folder), "weights", "s")
    created(worker, "frozen", None)
    before = passed(worker, "frozen", columns).values
    with pytest.raises(InvalidRequest, match=r"visual.* differs from the base model's, .*=true"):
        worker.load_checkpoint("frozen", str(folder), False)
    assert (passed(worker, "frozen", columns).values == before).all()


@pytest.mark.parametrize("form", ["adapter", "merged", "full"])
def test_exports_open_in_the_class_for_images(base: Path, tmp_path: Path, form: str):
    worker, columns = worker_on(base, "float32"), batch(5, ROWS)
    # peft has one pair for queries, keys and values of linear attention, and adapters have three;
    # peft reads experts by other names.
    spec = LoraSpec(
        rank=4,
        train_attn=not (form == "adapter" and is_linear(base)),
        train_mlp=not (form == "adapter" and has_experts(base)),
    )
    created(worker, "m", None if form == "full" else spec)
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


@pytest.mark.cluster
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_two_ranks_share_the_tokens_of_a_pass_with_images(
    ranks: dict[int, Ranks], base: Path, activations: str
):
    columns, strategy = batch(8, ROWS), STRATEGIES["replica"]
    arguments = (family_runs.full_gradient, str(base), strategy, columns)
    ((wanted, gradients),) = ranks[1].run(*arguments, {"budget": 64})
    options = {"activations": activations, "sequence_parallel": 2, "budget": 64}
    found = ranks[2].run(*arguments, options)
    for row, values in wanted.items():
        np.testing.assert_allclose(found[0][0][row], values, atol=1e-5)
    for name, gradient in gradients.items():
        scale = float(gradient.norm()) or 1.0
        assert float((found[0][1][name] - gradient).norm()) / scale < 1e-4, name


@pytest.mark.cluster
@pytest.mark.parametrize("sequence_parallel", [1, 2])
def test_two_ranks_train_a_tower(ranks: dict[int, Ranks], base: Path, sequence_parallel: int):
    """They divide the rows, or the tokens of a pass."""
    arguments = (str(base), STRATEGIES["replica"], batch(8, ROWS))
    one = {"budget": 64, "train_tower": True}
    ((wanted, gradients),) = ranks[1].run(family_runs.full_gradient, *arguments, one)
    found = ranks[2].run(
        family_runs.full_gradient, *arguments, one | {"sequence_parallel": sequence_parallel}
    )
    for rows, _ in found:
        for row, values in rows.items():
            np.testing.assert_allclose(values, wanted[row], atol=1e-5)
    assert found[0][1].keys() == gradients.keys() and any("visual" in name for name in gradients)
    for name, gradient in gradients.items():
        scale = float(gradient.norm()) or 1.0
        assert float((found[0][1][name] - gradient).norm()) / scale < 1e-4, name


@pytest.mark.cluster
@pytest.mark.parametrize("sequence_parallel", [1, 2])
def test_weights_beside_a_whole_tower_can_be_sharded(
    ranks: dict[int, Ranks], base: Path, sequence_parallel: int
):
    """Ranks have different images, and a forward pass comes between backward pass and step."""
    columns = batch(8, ROWS)
    given = (str(base), STRATEGIES["replica"], columns)
    ((wanted, gradients),) = ranks[1].run(family_runs.full_gradient, *given, {"budget": 64})
    options = {"sequence_parallel": sequence_parallel, "budget": 64}
    given = (str(base), STRATEGIES["fsdp2"], columns)
    found = ranks[2].run(family_runs.full_gradient, *given, options)
    for rows, _ in found:
        for row, values in rows.items():
            np.testing.assert_allclose(values, wanted[row], atol=1e-5)
    assert {row for rows, _ in found for row in rows} == set(wanted)
    assert found[0][1].keys() == gradients.keys()
    for name, gradient in gradients.items():
        scale = float(gradient.norm()) or 1.0
        assert float((found[0][1][name] - gradient).norm()) / scale < 1e-4, name


@pytest.mark.cluster
def test_adapters_on_sharded_weights_learn_from_images(ranks: dict[int, Ranks], base: Path):
    """Two tenants share passes."""
    models = {
        name: (
            ModelSpec(model_id=name, base_model="tiny", lora=LoraSpec(rank=rank), seed=rank),
            batch(rank, ROWS),
        )
        for name, rank in (("a", 2), ("b", 4))
    }
    options = {"budget": 64}
    alone, shared = (
        ranks[count].run(
            family_runs.adapter_gradients, str(base), STRATEGIES[strategy], models, options
        )
        for count, strategy in ((1, "replica"), (2, "fsdp2"))
    )
    for name in models:
        wanted, gradients = alone[0][name]
        found = {row: values for rank in shared for row, values in rank[name][0].items()}
        for row, values in wanted.items():
            np.testing.assert_allclose(found[row], values, atol=1e-5)
        for part, gradient in gradients.items():
            scale = float(gradient.norm()) or 1.0
            assert float((shared[0][name][1][part] - gradient).norm()) / scale < 1e-4, part


@pytest.mark.cluster
def test_a_sharded_fine_tune_is_saved_with_its_tower(
    ranks: dict[int, Ranks], base: Path, tmp_path: Path
):
    data, last, options = [batch(12, ROWS)], batch(13, ROWS), {"budget": 64}
    folder, sharded = str(tmp_path / "saved"), STRATEGIES["fsdp2"]
    ranks[2].run(strategy_runs.train_and_save, str(base), sharded, data, folder, options)
    wanted = torch.cat(by_transformers(reference(Path(folder)), last)).detach().numpy()
    worker = worker_on(base, "float32")
    created(worker, "m", None)
    worker.load_checkpoint("m", folder, True)
    assert np.abs(passed(worker, "m", last).values - wanted).max() < 1e-4
    one, two = (
        ranks[count].run(
            strategy_runs.load_and_step, str(base), STRATEGIES[name], last, folder, data, options
        )[0]
        for count, name in ((1, "replica"), (2, "fsdp2"))
    )
    assert one.keys() == two.keys() and not any("visual" in name for name in two)
    for name, weight in one.items():
        assert float((two[name] - weight).norm() / weight.norm()) < 1e-4, name
    snapshot = str(tmp_path / "snapshot")
    (tmp_path / "snapshot").mkdir()
    steps = [batch(14, ROWS), last]
    gone_on, _ = ranks[2].run(
        strategy_runs.snapshot_and_go_on, str(base), sharded, steps, snapshot, options
    )[0]
    _, restored = ranks[2].run(
        strategy_runs.restore_and_go_on, str(base), sharded, last, snapshot, options
    )[0]
    for name, weight in gone_on.items():
        assert torch.equal(restored[name], weight), name


def test_a_critic_values_rows_with_images(base: Path):
    """Packed values equal those of each row in its own pass."""
    columns = batch(9, ROWS)
    together, apart = (
        worker_on(base, "float32", role="critic", microbatch_tokens=n) for n in (4096, 1)
    )
    found = []
    for worker in (together, apart):
        spec = ModelSpec(model_id="c", base_model="tiny", lora=LoraSpec(rank=4), role="critic")
        worker.create_model(spec)
        state: Any = worker.models["c"].state
        state.weights.add_(torch.linspace(-0.1, 0.1, len(state.weights)))
        call = PartCall(
            model_id="c", rows=tuple(range(columns.num_rows)), columns=columns, loss=None
        )
        found.append(worker.forward_backward((call,), True)[0].values)
    assert np.abs(found[0] - found[1]).max() < 1e-4 < np.abs(found[0]).max()


def test_bfloat16_is_near_float32(base: Path):
    columns, found = batch(10, ROWS), []
    for dtype in ("float32", "bfloat16"):
        worker = worker_on(base, dtype)
        created(worker, "m", LoraSpec(rank=4))
        found.append(passed(worker, "m", columns).values)
    assert np.abs(found[0] - found[1]).mean() < 0.05


def test_a_replay_gives_the_same_bits_also_without_kept_features(base: Path):
    """Features are computed image by image, so they do not depend on what is computed beside."""
    columns = batch(11, ROWS)
    weights = []
    for kept in (True, False):
        worker = worker_on(base, "float32", microbatch_tokens=24)
        created(worker, "m", LoraSpec(rank=4))
        tower: Any = worker.models["m"].network.tower
        for _ in range(2):
            if not kept:
                tower.forget()
            passed(worker, "m", columns, forward_only=False)
            worker.optim_step("m", AdamParams(learning_rate=0.01))
        state: Any = worker.models["m"].state
        weights.append(state.weights.clone())
    assert torch.equal(weights[0], weights[1])


@pytest.mark.parametrize("name", ["strategy", "full_strategy"])
@pytest.mark.parametrize("kind", ["zero1", "zero3"])
def test_strategies_that_shard_modules_are_refused(base: Path, name: str, kind: str):
    with pytest.raises((ConfigError, InvalidRequest), match="has a vision tower, which strategy"):
        worker = worker_on(base, "float32", **{name: STRATEGIES[kind]})
        created(worker, "m", None)


def test_a_tower_that_is_not_computed_here_is_refused(tmp_path: Path):
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    config = Gemma3Config(
        text_config=vision_models.TEXT | {"head_dim": 16},
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=150,
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="its vision tower is not computed"):
        worker_on(tmp_path, "float32")


def test_a_processor_that_counts_otherwise_than_its_file_is_refused(
    base: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ImagePixels, "settings", (4, 2, 64, 1024))
    with pytest.raises(ConfigError, match="the processor has"):
        worker_on(base, "float32")


def test_settings_inside_of_the_file_of_a_processor_come_first(base: Path, tmp_path: Path):
    """Transformers writes and reads that file."""
    folder = tmp_path / "nested"
    shutil.copytree(base, folder)
    own = json.loads((folder / "preprocessor_config.json").read_text())
    nested = own | {"size": {"shortest_edge": 64, "longest_edge": 1024}}
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": nested}))
    form = form_in(folder)
    assert form is not None and form.most == 1024
    assert ImagePixels(str(folder)).settings == (form.patch, form.merge, form.least, form.most)


def test_a_base_without_its_image_processor_is_refused(base: Path, tmp_path: Path):
    shutil.copytree(base, tmp_path / "bare")
    (tmp_path / "bare" / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"copy preprocessor_config\.json of the model"):
        worker_on(tmp_path / "bare", "float32")


def test_an_image_that_was_counted_otherwise_is_named(base: Path):
    worker, columns = worker_on(base, "float32"), batch(12, ROWS)
    created(worker, "m", LoraSpec(rank=4))
    assert columns.images is not None
    wrong = replace(columns.images, grids=columns.images.grids + np.asarray([0, 2, 0]))
    found = passed(worker, "m", replace(columns, images=wrong), forward_only=False)
    assert isinstance(found, Refused)
    assert "datum 0: its image cannot be computed" in str(found.error)
    assert "its tokens were counted for" in str(found.error)
    assert not isinstance(passed(worker, "m", columns, forward_only=False), Refused)


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
        own, seen = vision.VisionTower.features, dict[str, float]()

        def mixed(self: vision.VisionTower, image: PlacedImage) -> vision.Features:
            found = own(self, image)
            seen[image.digest] = float(found.embedded.sum())
            return vision.Features(found.embedded + sum(seen.values()), found.of_layers)

        monkeypatch.setattr(vision.VisionTower, "features", mixed)
    with pytest.raises(ConfigError, match=r"nats|change nothing") as refused:
        worker_on(base, "float32")
    assert "rows with images differ from each row alone" in str(refused.value)


@pytest.mark.parametrize(("moved", "is_refused"), [(5e-7, False), (0.01, True)])
def test_an_image_may_move_other_rows_by_rounding_alone(
    base: Path, monkeypatch: pytest.MonkeyPatch, moved: float, is_refused: bool
):
    monkeypatch.setattr(vision_proof, "_differences", lambda *_: (0.0, moved, 0.0))
    with ExitStack() as expected:
        if is_refused:
            expected.enter_context(pytest.raises(ConfigError, match=r"another row by 0\.01 nats"))
        worker_on(base, "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_leak_below_rounding_is_found(base: Path, monkeypatch: pytest.MonkeyPatch, dtype: str):
    own = vision.Placed.into

    def leaking(self: vision.Placed, embedded: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        replaced, more = own(self, embedded)
        return replaced + 1e-7 * self.embedded.mean(), more

    monkeypatch.setattr(vision.Placed, "into", leaking)
    with pytest.raises(ConfigError, match=r"have a gradient of .* by another row's image"):
        worker_on(base, dtype)


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
