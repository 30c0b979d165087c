"""Functions of (rank, world_size, port, …) that ranks run in the tests of strategies."""

import gc
import os
import resource
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from skyrl_actors import losses
from skyrl_actors.config.strategies import (
    DeepSpeedStrategy,
    Fsdp2Strategy,
    JaxStrategy,
    ReplicaStrategy,
    StrategyConfig,
)
from skyrl_actors.groups.sharding import assign_parts
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.model import AdamParams, LoraSpec, LossCall, ModelSpec
from skyrl_actors.workers import activation_offload
from skyrl_actors.workers.flat import FlatState
from skyrl_actors.workers.interface import PartCall, Refused, RowOutput, WorkerSpec
from skyrl_actors.workers.isolation import Differences, differences
from skyrl_actors.workers.rank_groups import own_group
from skyrl_actors.workers.state import MOMENTS
from skyrl_actors.workers.torch_worker import TorchWorker
from tests.workers.references import batch

PROGRAMS = Path(__file__).parents[2] / ".pytest_cache" / "jax"  # kept for the next run
STRATEGIES: dict[str, StrategyConfig] = {
    "replica": ReplicaStrategy(),
    "zero1": DeepSpeedStrategy(stage=1),
    "zero2": DeepSpeedStrategy(stage=2),
    "zero3": DeepSpeedStrategy(stage=3),
    "fsdp2": Fsdp2Strategy(),
    "jax": JaxStrategy(cache=PROGRAMS, prepare_s=0),
}
LAST_STEP = AdamParams(learning_rate=3e-3, beta1=0.8, eps=1e-8, weight_decay=0.1)
# The step makes exp_avg the gradient and leaves the weights.
READ_GRADIENT = AdamParams(learning_rate=0.0, beta1=0.0, beta2=0.9)


def worker_of(
    rank: int, world: int, port: int, base: str, strategy: StrategyConfig, **options: Any
) -> TorchWorker:
    role = options.pop("role", "policy")
    budget, dtype = options.pop("budget", 40), options.pop("dtype", "float32")
    spec = WorkerSpec(
        role=role,
        rank=rank,
        world_size=world,
        base_folder=base,
        dtype=dtype,
        device="cpu",
        num_threads=1,
        microbatch_tokens=budget,
        collective_timeout_s=60.0,
        strategy=strategy,
        full_strategy=strategy,
        preload=False,
        **options,
    )
    worker = made_for(spec)
    worker.setup("127.0.0.1", port)
    return worker


def made_for(spec: WorkerSpec) -> TorchWorker:
    if spec.strategy.type != "jax":
        return TorchWorker(spec)
    os.environ["JAX_PLATFORMS"] = "cpu"
    from skyrl_actors.jax_workers.worker import JaxWorker

    return JaxWorker(spec)


def run(
    worker: TorchWorker,
    calls: list[tuple[str, Columns, LossCall | None]],
    forward_only: bool = False,
) -> list[Any]:
    ranks = worker.spec.world_size // worker.spec.ranks_of_rows
    shares = assign_parts([columns.lengths for _, columns, _ in calls], ranks)[
        worker.spec.rank // worker.spec.ranks_of_rows
    ]
    parts = tuple(
        PartCall(model_id=m, rows=rows, columns=columns, loss=loss)
        for rows, (m, columns, loss) in zip(shares, calls, strict=True)
    )
    return worker.forward_backward(parts, forward_only)


def one(
    worker: TorchWorker,
    model_id: str,
    columns: Columns,
    name: str,
    forward_only: bool = False,
    **options: float,
) -> RowOutput:
    (outcome,) = run(
        worker, [(model_id, columns, losses.find(name).checked(options))], forward_only
    )
    if isinstance(outcome, Refused):
        raise outcome.error
    return outcome


def gathered(worker: TorchWorker, model_id: str, kind: Any) -> dict[str, torch.Tensor]:
    return {
        name: tensor.clone()
        for name, tensor in worker.models[model_id].state.tensors(kind)
        if tensor is not None
    }


def gradients_of_losses(
    rank: int,
    world: int,
    port: int,
    base: str,
    strategy: StrategyConfig,
    data: dict[str, list[Columns]],
    options: dict[str, Any],
) -> dict[str, Any]:
    """For each loss, return the gradient and the norm of its calls.

    A step with a learning rate of 0 reads the gradient.
    """
    worker = worker_of(rank, world, port, base, strategy, **options)
    worker.create_model(
        ModelSpec(model_id="m", base_model="tiny", role=options.get("role", "policy"))
    )
    if options.get("role") == "critic":
        set_value_head(worker)
    found: dict[str, Any] = {}
    for name, calls in data.items():
        outputs = [one(worker, "m", columns, name) for columns in calls]
        norm = worker.optim_step("m", READ_GRADIENT)["skyrl.ai/grad_norm"]
        gradients = gathered(worker, "m", "exp_avg")
        found[name] = (gradients, norm, [(o.rows, o.values, o.sums) for o in outputs])
    return found


def set_value_head(worker: TorchWorker, bias: float = 0.0) -> None:
    """Set a value head that is not zero, so that the trunk has a gradient."""
    state = worker.models["m"].state
    from skyrl_actors.workers.tensor_files import InMemory

    weights = gathered(worker, "m", "weights")
    if worker.spec.world_size > 1:
        import torch.distributed as dist

        holder = [weights]
        dist.broadcast_object_list(holder, 0)
        weights = holder[0]
    weights["value_head.weight"] = torch.linspace(
        -0.3, 0.3, weights["value_head.weight"].numel()
    ).view(1, -1)
    weights["value_head.bias"] = torch.full((1,), bias)
    state.load(InMemory(weights))


def trajectory(
    rank: int,
    world: int,
    port: int,
    base: str,
    strategy: StrategyConfig,
    data: Sequence[Columns | None],
    adams: list[AdamParams],
    options: dict[str, Any],
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Run a step after each call. For None, run a step without a call."""
    worker = worker_of(rank, world, port, base, strategy, **options)
    worker.create_model(
        ModelSpec(model_id="m", base_model="tiny", role=options.get("role", "policy"))
    )
    norms = []
    for columns, adam in zip(data, adams, strict=True):
        if columns is not None:
            one(worker, "m", columns, "cross_entropy")
        norms.append(worker.optim_step("m", adam)["skyrl.ai/grad_norm"])
    return gathered(worker, "m", "weights"), norms


def train_and_save(
    rank: int,
    world: int,
    port: int,
    base: str,
    strategy: StrategyConfig,
    data: list[Columns],
    folder: str,
    options: dict[str, Any],
) -> None:
    worker = worker_of(rank, world, port, base, strategy, **options)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny"))
    for columns in data:
        one(worker, "m", columns, "cross_entropy")
        worker.optim_step("m", AdamParams(learning_rate=1e-2))
    worker.save_checkpoint("m", folder, "training", "r1")


def load_and_step(
    rank: int,
    world: int,
    port: int,
    base: str,
    strategy: StrategyConfig,
    columns: Columns,
    folder: str,
    own: list[Columns],
    options: dict[str, Any],
) -> dict[str, torch.Tensor]:
    """Run one step after a load. `own` is trained before and must not matter."""
    worker = worker_of(rank, world, port, base, strategy, **options)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny"))
    for other in own:
        one(worker, "m", other, "cross_entropy")
    worker.load_checkpoint("m", folder, True)
    one(worker, "m", columns, "cross_entropy")
    worker.optim_step(
        "m", AdamParams(learning_rate=3e-3, beta1=0.8, beta2=0.95, eps=1e-8, weight_decay=0.1)
    )
    return gathered(worker, "m", "weights")


def snapshot_and_go_on(
    rank: int,
    world: int,
    port: int,
    base: str,
    strategy: StrategyConfig,
    data: list[Columns],
    folder: str,
    options: dict[str, Any],
) -> tuple[dict[str, torch.Tensor], int]:
    """Copy the state after all but the last call, and write it after the last one.

    Returns the weights after the last call, and the tensors that ranks gathered for the copy.
    """
    worker = worker_of(rank, world, port, base, strategy, **options)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny"))
    for columns in data[:-1]:
        one(worker, "m", columns, "cross_entropy")
        worker.optim_step("m", AdamParams(learning_rate=1e-2))
    state, gathers = worker.models["m"].state, 0
    tensors = state.tensors

    def counted(kind: Any) -> Any:
        nonlocal gathers
        for found in tensors(kind):
            gathers += 1
            yield found

    state.tensors = counted
    handle = worker.copy_state("m").handle
    state.tensors = tensors
    one(worker, "m", data[-1], "cross_entropy")
    worker.optim_step("m", LAST_STEP)
    worker.write_state(handle, folder)
    return gathered(worker, "m", "weights"), gathers


def restore_and_go_on(
    rank: int,
    world: int,
    port: int,
    base: str,
    strategy: StrategyConfig,
    columns: Columns,
    folder: str,
    options: dict[str, Any],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the restored weights, and those after one more call and step."""
    worker = worker_of(rank, world, port, base, strategy, **options)
    worker.restore_state(ModelSpec(model_id="m", base_model="tiny"), folder)
    restored = gathered(worker, "m", "weights")
    one(worker, "m", columns, "cross_entropy")
    worker.optim_step("m", LAST_STEP)
    return restored, gathered(worker, "m", "weights")


def values_in_order(columns: Columns, outputs: list[Any]) -> np.ndarray:
    """Merge the per-token results of all ranks by position."""
    values = np.zeros(columns.shape, np.float32)
    for rows, given, _ in outputs:
        values[columns.positions(rows)] = given
    return values


def tenants(
    rank: int,
    world: int,
    port: int,
    base: str,
    strategy: StrategyConfig,
    specs: list[ModelSpec],
    data: list[list[Columns]],
    loss: str,
    options: dict[str, Any],
) -> list[dict[str, torch.Tensor]]:
    """Run three calls of all tenants in shared passes, and return the gradients of each."""
    worker = worker_of(rank, world, port, base, strategy, **options)
    call = losses.find(loss).checked({})
    for spec in specs:
        worker.create_model(spec)
        state: Any = worker.models[spec.model_id].state
        state.weights.add_(
            torch.randn(len(state.weights), generator=torch.Generator().manual_seed(5)) * 0.05
        )
    for calls in data:
        run(
            worker,
            [(spec.model_id, columns, call) for spec, columns in zip(specs, calls, strict=True)],
        )
    found = []
    for spec in specs:
        worker.optim_step(spec.model_id, READ_GRADIENT)
        found.append(gathered(worker, spec.model_id, "exp_avg"))
    return found


def moved_about(
    rank: int,
    world: int,
    port: int,
    base: str,
    strategy: StrategyConfig,
    data: list[Columns],
    moves: bool,
    options: dict[str, Any],
) -> dict[str, torch.Tensor]:
    """Run two steps of two calls. Between calls, the parts move away and back, as in phases."""
    worker = worker_of(rank, world, port, base, strategy, **options)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny"))
    state = worker.models["m"].state
    gc.freeze()  # DeepSpeed collects garbage in each move

    def leave_and_return(*parts: str) -> None:
        for part in (*parts, *reversed(parts)) if moves else ():
            state.move(part, torch.device("cpu"))

    for step in range(2):
        for columns in data:
            one(worker, "m", columns, "cross_entropy")
            leave_and_return("gradients", "weights")
        worker.optim_step("m", AdamParams(learning_rate=1e-2 / (step + 1)))
        leave_and_return("optimizer")
    gc.unfreeze()
    return gathered(worker, "m", "weights")


def moved_away(
    rank: int,
    world: int,
    port: int,
    base: str,
    strategy: StrategyConfig,
    columns: Columns,
    parts: list[str],
    options: dict[str, Any],
) -> dict[str, list[str]]:
    """Return the device types of these parts after a move during an accumulation.

    The target device is not the host.
    """
    worker = worker_of(rank, world, port, base, strategy, **options)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny"))
    one(worker, "m", columns, "cross_entropy")
    worker.optim_step("m", AdamParams(learning_rate=1e-3))
    one(worker, "m", columns, "cross_entropy")
    state: Any = worker.models["m"].state
    for part in parts:
        state.move(part, torch.device("meta"))
    return {part: sorted({tensor.device.type for tensor in _held(state, part)}) for part in parts}


def _held(state: Any, part: str) -> list[torch.Tensor]:
    if isinstance(state, FlatState):
        moments = state.optimizer.moments() if state.optimizer else {}
        gradients = [
            state.gradients,
            state._lower_gradients,
            *(view.grad for view in state.views.values()),
        ]
        parts = {
            "weights": [state.weights, state._lower, *state.views.values()],
            "gradients": gradients,
            "optimizer": [moments[kind] for kind in MOMENTS],
        }
        return [tensor for tensor in parts[part] if tensor is not None]
    if part == "gradients":
        kept = (
            getattr(state._optimizer, "all_grad_tensors", {})
            if hasattr(state, "_optimizer")
            else {}
        )
        sums = (
            getattr(state._optimizer, "averaged_gradients", {})
            if hasattr(state, "_optimizer")
            else {}
        )
        lists = [tensors for tensors in (*kept.values(), *sums.values()) if tensors is not None]
        return [*state.gradients.tensors(), *(tensor for tensors in lists for tensor in tensors)]
    if part == "weights":
        return [tensor.to_local() for tensor in state.parameters.values()]
    return [
        moments[kind].to_local() for moments in state.optimizer.state.values() for kind in MOMENTS
    ]


def gradients_that_are_not_finite(
    rank: int,
    world: int,
    port: int,
    base: str,
    strategy: StrategyConfig,
    columns: Columns,
    options: dict[str, Any],
) -> tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Run a step with an infinite gradient although each loss is finite, then a valid step."""
    worker = worker_of(rank, world, port, base, strategy, **options)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny"))
    before = gathered(worker, "m", "weights")
    weights = np.asarray(columns.fields["weights"], np.float32) * np.float32(1e37)
    huge = Columns(
        tokens=columns.tokens,
        offsets=columns.offsets,
        fields={**columns.fields, "weights": weights.astype(np.float32)},
    )
    one(worker, "m", huge, "cross_entropy")
    try:
        worker.optim_step("m", AdamParams(learning_rate=1e-2))
        error_text = "nothing"
    except InvalidRequest as error:
        error_text = str(error)
    after = gathered(worker, "m", "weights")
    assert all(torch.equal(after[name], before[name]) for name in before)
    one(worker, "m", columns, "cross_entropy")
    worker.optim_step("m", AdamParams(learning_rate=1e-2))
    return error_text, before, gathered(worker, "m", "weights")


def dropped(
    rank: int,
    world: int,
    port: int,
    base: str,
    strategy: StrategyConfig,
    first: Columns,
    second: Columns,
    drop: bool,
    options: dict[str, Any],
) -> float:
    """Return the norm of the second call's gradient, also after a first call that was dropped."""
    worker = worker_of(rank, world, port, base, strategy, **options)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny"))
    if drop:
        one(worker, "m", first, "cross_entropy")
        worker.drop_gradients("m")
    one(worker, "m", second, "cross_entropy")
    return worker.optim_step("m", AdamParams(learning_rate=1e-3))["skyrl.ai/grad_norm"]


def apart(
    rank: int,
    world: int,
    port: int,
    base: str,
    strategy: StrategyConfig,
    columns: list[Columns],
    options: dict[str, Any],
) -> list[dict[str, torch.Tensor]]:
    """Each rank has rows of a different tenant, and the tenants train different layers."""
    specs = [
        ModelSpec(model_id="a", base_model="tiny", lora=LoraSpec(rank=4), seed=1),
        ModelSpec(
            model_id="b",
            base_model="tiny",
            lora=LoraSpec(rank=4, train_attn=False, train_mlp=False),
            seed=2,
        ),
        ModelSpec(
            model_id="c",
            base_model="tiny",
            lora=LoraSpec(rank=4, train_attn=False, train_unembed=False),
            seed=3,
        ),
    ]
    worker = worker_of(rank, world, port, base, strategy, **options)
    call = losses.find("cross_entropy").checked({})
    for spec in specs:
        worker.create_model(spec)
        state: Any = worker.models[spec.model_id].state
        state.weights.add_(
            torch.randn(len(state.weights), generator=torch.Generator().manual_seed(5)) * 0.05
        )
    together = options.get("sequence_parallel", 1) > 1 or world == 1
    turns = [(0, 1), (1, 2), (2, 0)] if not together else [(0, 1, 2)]
    for turn in turns:
        mine = turn if together else (turn[rank],)
        parts = tuple(
            PartCall(
                model_id=specs[i].model_id,
                rows=tuple(range(columns[i].num_rows)) if i in mine else (),
                columns=columns[i],
                loss=call,
            )
            for i in turn
        )
        worker.forward_backward(parts, False)
    found = []
    for spec in specs:
        assert worker.models[spec.model_id].state.pending
        worker.optim_step(spec.model_id, READ_GRADIENT)
        found.append(gathered(worker, spec.model_id, "exp_avg"))
    return found


def refused_on_one(
    rank: int,
    world: int,
    port: int,
    base: str,
    strategy: StrategyConfig,
    columns: Columns,
    lora: LoraSpec | None,
    options: dict[str, Any],
) -> list[tuple[str, bool]]:
    worker = worker_of(rank, world, port, base, strategy, **options)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny", lora=lora))
    outcomes = run(worker, [("m", columns, losses.find("importance_sampling").checked({}))])
    return [(str(o.error), o.clean) if isinstance(o, Refused) else ("", True) for o in outcomes]


def elements_read(
    rank: int, world: int, port: int, base: str, strategy: StrategyConfig, options: dict[str, Any]
) -> tuple[int, int]:
    """Return the elements read to create a full fine-tune, and the elements of the model."""
    from skyrl_actors.workers.tensor_files import TensorFiles

    worker = worker_of(rank, world, port, base, strategy, **options)
    whole_range, sizes = TensorFiles.range, list[int]()

    def counted(files: TensorFiles, name: str, start: int, stop: int) -> torch.Tensor:
        sizes.append(stop - start)
        return whole_range(files, name, start, stop)

    TensorFiles.range = counted  # type: ignore[method-assign]
    try:
        worker.create_model(ModelSpec(model_id="m", base_model="tiny"))
    finally:
        TensorFiles.range = whole_range  # type: ignore[method-assign]
    return sum(sizes), worker.models["m"].state.num_parameters


def offloaded(
    rank: int,
    world: int,
    port: int,
    base: str,
    strategy: StrategyConfig,
    columns: Columns,
    lora: LoraSpec | None,
    options: dict[str, Any],
) -> tuple[int, int, dict[str, torch.Tensor]]:
    """Run one pass; return bytes sent to the host, those of weights, and the gradient."""
    worker = worker_of(rank, world, port, base, strategy, **options)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny", lora=lora, seed=1))
    whole: Any = worker.models["m"].network.whole
    sent, placed = list[tuple[int, bool]](), activation_offload.placed

    def counted(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        weights = {
            _storage(parameter)
            for parameter in whole.parameters()
            if not isinstance(parameter, DTensor)
        }
        sent.append((tensor.nbytes, _storage(tensor) in weights))
        return placed(tensor, device)

    activation_offload.placed = counted
    try:
        call = losses.find("cross_entropy").checked({})
        worker.forward_backward(
            (
                PartCall(
                    model_id="m", rows=tuple(range(columns.num_rows)), columns=columns, loss=call
                ),
            ),
            False,
        )
    finally:
        activation_offload.placed = placed
    worker.optim_step("m", READ_GRADIENT)
    of_weights = sum(size for size, is_weight in sent if is_weight)
    return sum(size for size, _ in sent), of_weights, gathered(worker, "m", "exp_avg")


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def proved(
    rank: int, world: int, port: int, base: str, strategy: StrategyConfig, options: dict[str, Any]
) -> str | Differences:
    """Return what the check of a frozen base and a full fine-tune finds, or the refusal."""
    worker = worker_of(rank, world, port, base, strategy, **options)
    try:
        worker.create_model(
            ModelSpec(model_id="l", base_model="tiny", lora=LoraSpec(rank=2, train_mlp=False))
        )
        worker.create_model(ModelSpec(model_id="f", base_model="tiny"))
    except InvalidRequest as error:
        return str(error)
    found = differences(worker.models["f"].network)
    worker.delete_model("f")
    return found


def late_in_group(
    rank: int, world: int, port: int, base: str, timeout_s: float
) -> tuple[float, str]:
    """Wait in pairs of ranks for a rank that never comes; return the seconds and the error."""
    worker_of(rank, world, port, base, STRATEGIES["fsdp2"])
    group = own_group(tuple((i, i + 1) for i in range(0, world, 2)), timeout_s)
    started = time.monotonic()
    try:
        if rank % 2 == 0:
            dist.all_reduce(torch.zeros(1), group=group)
    except RuntimeError as error:
        return time.monotonic() - started, str(error)
    time.sleep(3 * timeout_s)
    return 0.0, ""


def constants(
    rank: int, world: int, port: int, base: str, strategy: StrategyConfig, lora: LoraSpec | None
) -> dict[str, torch.Tensor]:
    """Return the buffers that a model in bfloat16 computes with."""
    worker = worker_of(rank, world, port, base, strategy, dtype="bfloat16")
    worker.create_model(ModelSpec(model_id="m", base_model="tiny", lora=lora))
    module = worker.models["m"].network.module
    return {name: buffer.cpu() for name, buffer in module.named_buffers()}


def large_values(
    rank: int, world: int, port: int, base: str, strategy: StrategyConfig, columns: Columns
) -> np.ndarray:
    """Return values near 20 of a full critic in bfloat16."""
    worker = worker_of(
        rank, world, port, base, strategy, dtype="bfloat16", budget=4096, role="critic"
    )
    worker.create_model(ModelSpec(model_id="m", base_model="tiny", role="critic"))
    set_value_head(worker, bias=20.0)
    found = one(worker, "m", columns, "ppo_critic", forward_only=True).values
    one(worker, "m", columns, "ppo_critic")
    worker.optim_step("m", AdamParams(learning_rate=0.5, eps=1e-8))
    moved = gathered(worker, "m", "weights").get("value_head.bias")
    assert moved is None or 0.4 < abs(float(moved) - 20.0) < 0.6  # the head has its gradient
    return np.concatenate([found, one(worker, "m", columns, "ppo_critic", True).values])


def saved_on_full_disk(
    rank: int, world: int, port: int, base: str, strategy: StrategyConfig, folder: str
) -> tuple[str, float]:
    """Save while the files of rank 0 cannot grow, and then again."""
    worker = worker_of(rank, world, port, base, strategy)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny"))
    one(worker, "m", batch(1, (7, 9, 5, 11)), "cross_entropy")
    worker.optim_step("m", AdamParams(learning_rate=1e-2))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    began, failure = time.monotonic(), ""
    try:
        worker.save_checkpoint("m", folder, "training", "r1")
    except OSError as error:
        failure = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    worker.save_checkpoint("m", folder, "training", "r2")
    blocked = Path(folder).with_name("file")
    blocked.touch()
    try:
        worker.export_weights("m", str(blocked / "version"), "v", checksums=False)
    except OSError as error:
        failure += str(error)
    seconds = time.monotonic() - began
    return failure, seconds
