"""A rank on JAX: sequences of verbs as on torch, the same bits in another process, refusals."""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from transformers import LlamaConfig, OlmoConfig

from skyrl_actors import losses
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.groups import GroupConfig
from skyrl_actors.config.strategies import JaxStrategy, ReplicaStrategy
from skyrl_actors.jax_workers.network import JaxNetwork
from skyrl_actors.jax_workers.passes import JaxPass
from skyrl_actors.jax_workers.programs import Shape
from skyrl_actors.jax_workers.worker import JaxWorker
from skyrl_actors.messages.errors import ConfigError, InvalidRequest
from skyrl_actors.messages.model import AdamParams, LoraSpec, ModelSpec, Role
from skyrl_actors.workers.interface import Refused, RowOutput, WorkerSpec
from skyrl_actors.workers.torch_worker import TorchWorker
from tests.engines.test_vllm_start import saved
from tests.jax_workers.test_network import SIZE
from tests.workers.references import batch
from tests.workers.strategy_runs import PROGRAMS, gathered, one, run, worker_of
from tests.workers.tiny_models import make

ROWS = ((9, 30, 4), (17, 5), (70, 3, 3))
STEP = AdamParams(learning_rate=1e-2, weight_decay=0.1)
FORMS = {"adapter": LoraSpec(rank=4), "full": None}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen3", tmp_path_factory.mktemp("qwen3"))


def made(base: Path, kind: str = "jax") -> TorchWorker:
    strategy = JaxStrategy(cache=PROGRAMS, prepare_s=0) if kind == "jax" else ReplicaStrategy()
    return worker_of(0, 1, 0, str(base), strategy, budget=256)


def create(worker: TorchWorker, lora: LoraSpec | None, name: str = "m") -> None:
    worker.create_model(ModelSpec(model_id=name, base_model="tiny", lora=lora, seed=5))


def weights(worker: TorchWorker) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in gathered(worker, "m", "weights").items()}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_model_moves_between_torch_and_jax_by_its_checkpoint(
    base: Path, tmp_path: Path, form: str
):
    """Each of six steps has two calls, and a forward between them. JAX makes two of the steps."""
    data = [batch(number, ROWS[number % 3]) for number in range(12)]

    def steps(worker: TorchWorker, first: int, last: int) -> None:
        for number in range(first, last):
            one(worker, "m", data[2 * number], "cross_entropy")
            one(worker, "m", data[0], "cross_entropy", forward_only=True)
            one(worker, "m", data[2 * number + 1], "cross_entropy")
            worker.optim_step("m", STEP)

    alone, first, second, third = (made(base, kind) for kind in ("torch", "torch", "jax", "torch"))
    for worker in (alone, first, second, third):
        create(worker, FORMS[form])
    steps(alone, 0, 6)
    steps(first, 0, 2)
    first.save_checkpoint("m", str(tmp_path / "one"), "training", "mark")
    second.load_checkpoint("m", str(tmp_path / "one"), with_optimizer=True)
    held, given = weights(second), weights(first)
    assert all((held[name] == given[name]).all() for name in given)
    steps(second, 2, 4)
    second.save_checkpoint("m", str(tmp_path / "two"), "training", "mark")
    third.load_checkpoint("m", str(tmp_path / "two"), with_optimizer=True)
    steps(third, 4, 6)
    found, wanted = weights(third), weights(alone)
    assert max(float(np.abs(found[name] - wanted[name]).max()) for name in wanted) < 2e-5


def test_the_first_weights_of_an_adapter_equal_torchs(base: Path):
    found, wanted = [], []
    for kind, into in (("jax", found), ("torch", wanted)):
        worker = made(base, kind)
        create(worker, LoraSpec(rank=4))
        into.append(weights(worker))
    assert all((found[0][name] == value).all() for name, value in wanted[0].items())


def test_a_loss_that_is_not_finite_is_refused_and_the_other_model_is_computed(base: Path):
    worker = made(base)
    for name in "mn":
        create(worker, LoraSpec(rank=4), name)
    columns = batch(1, ROWS[0])
    spoiled = batch(1, ROWS[0])
    spoiled.fields["weights"][3] = np.inf
    call = losses.find("cross_entropy").checked({})
    refused, computed = run(worker, [("m", spoiled, call), ("n", columns, call)])
    assert isinstance(refused, Refused) and refused.clean and "not finite" in str(refused.error)
    assert not isinstance(computed, Refused)
    assert worker.optim_step("m", STEP)["skyrl.ai/grad_norm"] == 0
    assert worker.optim_step("n", STEP)["skyrl.ai/grad_norm"] > 0


def test_more_targets_of_another_tenant_leave_a_distribution_alone(base: Path):
    worker = made(base)
    for name in "mn":
        create(worker, LoraSpec(rank=4), name)
    own, other = batch(1, ROWS[0], ("logprobs", "advantages")), batch(2, ROWS[1])
    for name, values in other.fields.items():
        other.fields[name] = np.stack([values] * 3, axis=1)
    other = replace(other, widths=np.full(other.num_rows, 3, np.int32))
    truncated = losses.find("importance_sampling").checked({"top_k": 3})
    (alone,) = run(worker, [("m", own, truncated)])
    plain = losses.find("cross_entropy").checked({})
    shared, _ = run(worker, [("m", own, truncated), ("n", other, plain)])
    assert isinstance(alone, RowOutput) and isinstance(shared, RowOutput)
    np.testing.assert_allclose(shared.values, alone.values, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_deleted_model_leaves_no_arrays(base: Path, form: str):
    worker = made(base)
    create(worker, FORMS[form])
    network = worker.models["m"].network
    assert isinstance(network, JaxNetwork)
    held = set(network._cache)
    one(worker, "m", batch(1, ROWS[0]), "cross_entropy")
    assert {*network._cache} - held
    worker.delete_model("m")
    left = [each.views for key, each in network._cache.items() if key not in held]
    assert not any(left)  # but for places without an adapter


@pytest.mark.slow
def test_after_out_of_memory_a_pass_runs_in_halves(base: Path, monkeypatch: pytest.MonkeyPatch):
    worker = made(base)
    for name in "mn":
        create(worker, LoraSpec(rank=4), name)
    columns, call = batch(1, (30, 30, 30)), losses.find("cross_entropy").checked({})
    (wanted,) = run(worker, [("m", columns, call)])
    network = worker.models["n"].network
    assert isinstance(network, JaxNetwork)
    plain = network.programs.run

    def limited(shape: Shape, name: str, *arguments: object) -> object:
        if name == "backward" and shape.tokens > 64:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return plain(shape, name, *arguments)

    monkeypatch.setattr(network.programs, "run", limited)
    (found,) = run(worker, [("n", columns, call)])
    assert not isinstance(found, Refused)
    np.testing.assert_allclose(found.values, wanted.values, atol=1e-5)
    norms = [worker.optim_step(name, STEP)["skyrl.ai/grad_norm"] for name in "mn"]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)  # nothing is counted twice


def prepared(base: Path, seconds: float, **options: Any) -> JaxWorker:
    worker = JaxWorker(
        WorkerSpec(
            rank=0,
            world_size=1,
            base_folder=str(base),
            dtype="float32",
            device="cpu",
            num_threads=2,
            microbatch_tokens=64,
            collective_timeout_s=60.0,
            strategy=JaxStrategy(cache=PROGRAMS, prepare_s=seconds),
            max_rank=4,
            **options,
        )
    )
    worker.setup("127.0.0.1", 0)
    return worker


def num_programs(worker: JaxWorker) -> int:
    base = worker.model_factory.base
    assert isinstance(base, JaxNetwork)
    return base.programs.counters.programs


@pytest.mark.slow
@pytest.mark.parametrize("role", ["policy", "critic"])
def test_usual_calls_need_no_program_that_was_not_prepared(base: Path, role: Role):
    worker = prepared(base, 600, role=role)
    spec = ModelSpec(model_id="m", base_model="tiny", lora=LoraSpec(rank=4), seed=5, role=role)
    worker.create_model(spec)
    before = num_programs(worker)
    loss = "cross_entropy" if role == "policy" else "ppo_critic"
    for number, rows in enumerate(((9,), (30, 20), (60, 3))):
        data = batch(number, rows, ("returns", "values") if role == "critic" else ())
        if role == "policy":
            one(worker, "m", data, loss, forward_only=True)
        one(worker, "m", data, loss)
        worker.optim_step("m", STEP)
    assert num_programs(worker) == before


def test_no_program_is_prepared_after_the_time_for_it(base: Path, caplog: pytest.LogCaptureFixture):
    worker = prepared(base, 0, role="policy")
    assert "prepared 0 shapes of programs" in caplog.text
    assert "2 are left to their first use" in caplog.text
    worker.create_model(ModelSpec(model_id="m", base_model="tiny", lora=LoraSpec(rank=4), seed=5))
    one(worker, "m", batch(1, ROWS[1]), "cross_entropy")


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("policy.strategy", {"policy": {"strategy": {"type": "jax", "prepare_s": 700}}}),
        ("engine", {"engine": {"type": "jax", "prepare_s": 700}}),
    ],
)
def test_a_service_must_start_in_time(key: str, options: dict):
    with pytest.raises(ValueError, match=rf"{key}\.prepare_s is 700, and a group or an engine"):
        ClusterConfig.model_validate(options)


SCRIPT = """
import json, sys
from pathlib import Path
from tests.jax_workers.test_worker import trained_bits
print(json.dumps(trained_bits(Path(sys.argv[1]), Path(sys.argv[2]))))
"""


def trained_bits(base: Path, cache: Path) -> tuple[str, str]:
    """Return a digest of the weights after two steps, and what was compiled."""
    worker = worker_of(0, 1, 0, str(base), JaxStrategy(cache=cache, prepare_s=0), budget=256)
    create(worker, LoraSpec(rank=4))
    for number in range(2):
        one(worker, "m", batch(number, ROWS[number]), "cross_entropy")
        worker.optim_step("m", STEP)
    joined = b"".join(value.tobytes() for value in weights(worker).values())
    return hashlib.sha256(joined).hexdigest(), worker.paths()["programs"]


@pytest.mark.slow
def test_another_process_compiles_nothing_and_computes_the_same_bits(base: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    found: list[tuple[str, str]] = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(base), str(cache)],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": "1"},
        )
        found.append(json.loads(done.stdout.splitlines()[-1]))
    (first, cold), (second, warm) = found
    assert first == second
    programs = cold.partition(" ")[0]
    assert ", 0 of them from the cache" in cold
    assert f", {programs} of them from the cache" in warm
    assert cache.stat().st_mode & 0o077 == 0  # its content is run


@pytest.mark.slow
def test_a_damaged_program_is_compiled_again(base: Path, tmp_path: Path):
    first, programs = trained_bits(base, tmp_path)
    files = sorted((tmp_path / "executables").iterdir())
    assert f"{len(files)} for" in programs
    files[0].write_bytes(files[0].read_bytes()[:-1])
    files[1].write_bytes(b"")
    second, programs = trained_bits(base, tmp_path)
    assert f"{len(files) - 2} of them from the cache" in programs
    assert first == second
    assert sorted((tmp_path / "executables").iterdir()) == files


def test_jax_keeps_no_programs_of_its_own_when_the_user_asks_for_it(tmp_path: Path):
    code = (
        "import jax; from skyrl_actors.jax_workers.devices import configure; configure(); "
        "jax.jit(lambda x: x + 1)(1.0)"
    )
    own = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    always = {
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, "-c", code]
    subprocess.run(command, env={**os.environ, **own, **always}, check=True, timeout=60)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_programs_that_were_not_used_for_a_month_are_deleted(base: Path, tmp_path: Path):
    trained_bits(base, tmp_path)
    used = next((tmp_path / "executables").iterdir())
    unused = used.with_stem("0" * 64)
    unused.write_bytes(b"")
    os.utime(unused, (0, 0))
    made = worker_of(0, 1, 0, str(base), JaxStrategy(cache=tmp_path, prepare_s=0))
    create(made, LoraSpec(rank=4))
    assert used.exists()
    assert not unused.exists()


def test_a_family_without_a_description_is_refused_by_name(tmp_path: Path):
    base = saved(OlmoConfig(**SIZE), tmp_path)
    with pytest.raises(InvalidRequest, match=r"strategy jax cannot train olmo: it knows llama"):
        create(made(base), LoraSpec(rank=4))


def test_a_weight_that_no_layer_uses_is_refused_by_name(tmp_path: Path):
    base = saved(LlamaConfig(**SIZE, mlp_bias=True), tmp_path)
    with pytest.raises(InvalidRequest, match=r"does not compute model\.layers\.0\.mlp\.down_proj"):
        create(made(base), LoraSpec(rank=4))


def test_an_accelerator_that_jax_does_not_see_is_refused_by_name():
    from skyrl_actors.jax_workers.devices import device_for

    with pytest.raises(ConfigError, match=r"placement\.device is gpu, and JAX sees only cpu:0"):
        device_for("gpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"full_strategy": {"type": "replica"}}, "both jax or neither"),
        ({"sequence_parallel": 2, "num_ranks": 2}, "sequence_parallel is not available"),
        ({"activations": "offload"}, "offload is not available with strategy jax"),
    ],
)
def test_options_that_jax_does_not_honour_are_refused(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        GroupConfig.model_validate({"strategy": {"type": "jax"}, **options})


def test_shared_gpus_are_refused():
    with pytest.raises(ValueError, match=r"policy\.strategy jax keeps its GPU memory"):
        ClusterConfig.model_validate(
            {"placement": {"device": "gpu"}, "policy": {"strategy": {"type": "jax"}}}
        )


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("skyrl_actors.config.strategies.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'skyrl-actors\[jax\]'"):
        JaxStrategy()


def test_full_fine_tunes_take_the_strategy_of_adapters():
    group = GroupConfig(strategy=JaxStrategy())
    assert group.full_strategy_on("cpu") == group.full_strategy_on("gpu") == group.strategy


@pytest.mark.slow
def test_a_pass_with_given_experts_is_proved_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    base = make("qwen3-moe", tmp_path)
    strategy = JaxStrategy(cache=PROGRAMS, prepare_s=0)
    create(worker_of(0, 1, 0, str(base), strategy, router_replay=True), LoraSpec(rank=4))
    monkeypatch.setattr(JaxPass, "_routes", lambda *_: None)  # the router chooses
    broken = JaxStrategy(cache=tmp_path / "programs", prepare_s=0)
    with pytest.raises(InvalidRequest, match=r"does not compute qwen3_moe with given experts"):
        create(worker_of(0, 1, 0, str(base), broken, router_replay=True), LoraSpec(rank=4))
