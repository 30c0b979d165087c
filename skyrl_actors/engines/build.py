"""Build the pool of engines from the configuration and the placement plan."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ray.util.placement_group import PlacementGroup

from placement.types import Plan, Slot
from skyrl_actors import remote
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.engines.engine_site import ActorSite, EngineSite, RankSite
from skyrl_actors.engines.external_engine import ExternalEngine
from skyrl_actors.engines.interface import EngineSpec
from skyrl_actors.engines.local_engine import LocalEngine
from skyrl_actors.engines.logprob_check import LogprobCheck
from skyrl_actors.engines.pool import Deliver, EnginePool
from skyrl_actors.groups.supervisor import GroupSupervisor
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.messages.image_form import form_in
from skyrl_actors.messages.quantization import quantization_in
from skyrl_actors.transfer.transport import EnginePlace


def build_pool(
    config: ClusterConfig,
    base_folder: Path,
    plan: Plan,
    reserved: PlacementGroup,
    devices: Mapping[int, str],
    environment: dict[str, str],
    deliver: Deliver,
    policy: GroupSupervisor,
    epoch: int,
    detached: bool,
    report: Callable[[str], None],
    planned_bytes: int = 0,
) -> EnginePool:
    """Build a pool for the planned slots.

    `devices`: GPU ids by slot, for multi-GPU engines. `policy`: whose ranks can host engines.
    `planned_bytes`: of an engine on one device.
    """
    engine = config.engine
    own = (hold for slot in plan.slots_of("engine")[:1] for hold in slot.holds)
    share = next((amount for kind, _, amount in own if kind == "engine"), 1.0)
    content = json.loads((base_folder / "config.json").read_text())
    bound = config.logprob_bound(quantization_in(content, base_folder.name) is not None)
    form = form_in(base_folder)
    logprob_check = LogprobCheck(config.logprob_check, bound, config.policy.dtype, report, form)
    pool = EnginePool(engine, base_folder, deliver, logprob_check)
    for index, slots in enumerate(plan.actors_of("engine")):
        spec = _spec_of(index, slots, devices, config, base_folder, planned_bytes, detached)
        beside = [
            rank
            for rank, slot in enumerate(plan.slots_of("policy"))
            if slot.index == slots[0].index
        ]
        if engine.process == "policy":
            longest = max(config.restart.start_timeout_s, config.restart.call_timeout_s)
            site: EngineSite = RankSite(spec=spec, rank=beside[0], policy=policy, timeout_s=longest)
        else:
            site = ActorSite(
                spec=spec,
                name=f"{config.name}:engine:{index}",
                reserved=reserved,
                bundle=slots[0].index,
                share=share,
                on_gpu=plan.device == "GPU" and len(slots) == 1,
                environment=environment | _environment_of(spec, slots, engine.num_threads, share),
                detached=detached,
                over_nodes=spec.over_nodes,
            )
        place = EnginePlace(engine.topology.num_devices, *beside)
        pool.engines.append(
            LocalEngine(site, engine, config.restart, epoch, pool.load, report, place)
        )
    pool.engines += external_members(config, report)
    return pool


def _environment_of(
    spec: EngineSpec, slots: Sequence[Slot], num_threads: int, share: float
) -> dict[str, str]:
    """Return the environment variables of one engine's actor, in addition to those of all."""
    own = {"OMP_NUM_THREADS": str(num_threads)}
    if spec.type == "jax":
        own["NPROC"] = str(num_threads)  # of XLA's thread pools
        if spec.device == "cpu":
            own["JAX_PLATFORMS"] = "cpu"
    if spec.over_nodes:  # vLLM creates its workers as Ray actors in these bundles
        own |= {
            "VLLM_RAY_BUNDLE_INDICES": ",".join(str(slot.index) for slot in slots),
            "VLLM_RAY_PER_WORKER_GPUS": str(share),
            "RAY_ADDRESS": "auto",
        }
    return own


def _spec_of(
    index: int,
    slots: Sequence[Slot],
    devices: Mapping[int, str],
    config: ClusterConfig,
    base_folder: Path,
    planned_bytes: int,
    of_service: bool,
) -> EngineSpec:
    engine = config.engine
    over_nodes = len({slot.node for slot in slots}) > 1
    ids = [devices[slot.index] for slot in slots if slot.index in devices]
    return EngineSpec(
        name=f"engine[{index}]",
        base_folder=str(base_folder),
        type=engine.type,
        planned_bytes=planned_bytes,
        device=config.placement.device,
        dtype=engine.dtype,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        kv_cache_bytes=engine.kv_cache_bytes,
        max_loras=engine.max_loras,
        max_lora_rank=config.lora.max_rank,
        expert_layout=config.lora.expert_layout,
        max_adapters=config.engine_adapters,
        enforce_eager=engine.enforce_eager,
        call_timeout_s=config.restart.call_timeout_s,
        topology=engine.topology,
        device_ids=() if over_nodes else tuple(ids),
        over_nodes=over_nodes,
        keeps_in_flight=engine.in_flight == "keep",
        arguments=json.dumps(engine.vllm, sort_keys=True),
        environment=tuple(sorted(config.environment.items())),
        router_replay=config.router_replay,
        tool_parser=engine.tool_parser,
        max_images=config.limits.images if form_in(base_folder) else 0,
        # A job compiles only what its samples need.
        prepare_s=engine.seconds_to_prepare if of_service else 0.0,
        takes_full_weights=config.lora.max_full_models > 0 or engine.sleep_level == "2",
    )


def external_members(config: ClusterConfig, report: Callable[[str], None]) -> list[ExternalEngine]:
    """Build the engines by URL. Raise ConfigError if the variable of an API key is not set."""
    found: list[ExternalEngine] = []
    for number, asked in enumerate(config.engine.external):
        key = os.environ.get(asked.api_key_env) if asked.api_key_env else None
        if asked.api_key_env and key is None:
            raise ConfigError(
                f"engine.external {asked.url}: the controller has no variable "
                f"{asked.api_key_env}; set it before `serve`"
            )
        found.append(
            ExternalEngine(f"external[{number}]", asked, key, config.engine, config.restart, report)
        )
    return found


async def end_others(pool: EnginePool, actors: remote.Actors, prefix: str) -> None:
    """End engines of an earlier controller, named with `prefix`, that the pool does not have."""
    local = [engine for engine in pool.engines if isinstance(engine, LocalEngine)]
    wanted = [name for engine in local for name in engine.site.actor_names]
    await remote.end_named([n for n in actors if n.startswith(prefix) and n not in wanted])
