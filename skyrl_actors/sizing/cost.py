"""The estimated seconds of one iteration of RL with a config (pure).

The estimate ranks layouts of one model on the same devices. It is no measurement. The iteration
samples SAMPLES answers, trains on them once with an adapter, and changes the phase there and back.

* Sampling: each decode step reads the weights and the KV cache of its sequences, or computes two
  operations for each active weight, whichever takes longer (roofline).
* Training: an adapter needs four operations for each active weight and token: forward, and the
  gradient of the inputs. `recompute` adds a second forward. A sharded base is gathered in each
  direction; that overlaps with computing.
* A change of phase copies what leaves the device to host memory, and back.
"""

import math
from dataclasses import dataclass

from placement.devices import DeviceKind
from placement.memory import ALL, MemoryPlan
from placement.shape import ModelShape
from skyrl_actors.backends.kv_cache import NUMBER_BYTES
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.groups import GroupConfig
from skyrl_actors.config.strategies import Fsdp2Strategy

SAMPLES, PROMPT_TOKENS, ANSWER_TOKENS = 2048, 512, 1024
COMPUTE_SHARE = 0.4  # of the peak that training and prefill reach
BANDWIDTH_SHARE = 0.7  # of the peak that decoding reaches
STEP_S = 0.003  # scheduling and launches of one decode step of a stage
LAYER_S = 0.0003  # launches of one layer in a training pass
ALL_REDUCE_S = 15e-6  # latency of an all-reduce between devices of a node
NETWORK_GBPS = 25.0  # of one device to other nodes
GIGA = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Estimated seconds of an iteration, by what takes them."""

    sample_s: float
    train_s: float
    switch_s: float

    @property
    def iteration_s(self) -> float:
        return self.sample_s + self.train_s + self.switch_s

    @property
    def sampled_tokens_per_s(self) -> float:
        return SAMPLES * ANSWER_TOKENS / self.sample_s if self.sample_s else 0.0

    @property
    def trained_tokens_per_s(self) -> float:
        return SAMPLES * (PROMPT_TOKENS + ANSWER_TOKENS) / self.train_s


def cost_of(
    config: ClusterConfig, shape: ModelShape, memory: MemoryPlan, kind: DeviceKind, nodes: int
) -> Cost:
    """Estimate an iteration. `nodes` is the number of nodes that the trainers are on."""
    policy = _training_s(config.policy, shape, kind, nodes)
    critic = _training_s(config.critic, shape, kind, nodes) if config.critic else 0.0
    together = config.placement.layout == "colocated"
    return Cost(
        sample_s=_sampling_s(config, shape, kind),
        train_s=policy + critic if together else max(policy, critic),
        switch_s=_switch_s(config, memory, kind),
    )


def _sampling_s(config: ClusterConfig, shape: ModelShape, kind: DeviceKind) -> float:
    engine = config.engine
    if not engine.num_engines:
        return 0.0
    tensor, stages = engine.tensor_parallel, engine.pipeline_parallel
    number, devices = NUMBER_BYTES[engine.dtype], engine.topology.num_devices
    token_bytes = shape.kv_bytes_per_token(number, tensor, stages)
    longest = PROMPT_TOKENS + ANSWER_TOKENS
    room = engine.kv_cache_bytes // (token_bytes * min(longest, engine.max_model_len))
    share = math.ceil(SAMPLES / engine.num_engines)
    running = max(1, min(engine.max_num_seqs, room, share))
    read = (
        min(shape.num_parameters, shape.active_parameters * running) * number / devices
        + running * (PROMPT_TOKENS + ANSWER_TOKENS / 2) * token_bytes
    )
    reading_s = read / (kind.memory_gbps * GIGA * BANDWIDTH_SHARE)
    speed = devices * kind.tflops * 1e12 * COMPUTE_SHARE
    computing_s = 2 * shape.active_parameters * running / speed
    reduced = running * shape.hidden * number / (kind.link_gbps * GIGA)
    reducing_s = 2 * shape.layers * (ALL_REDUCE_S + reduced) if tensor > 1 else 0.0
    step_s = max(reading_s, computing_s) + stages * STEP_S + reducing_s
    prefill_s = 2 * shape.active_parameters * PROMPT_TOKENS * share / speed
    return share / running * ANSWER_TOKENS * step_s + prefill_s


def _training_s(group: GroupConfig, shape: ModelShape, kind: DeviceKind, nodes: int) -> float:
    tokens = SAMPLES * (PROMPT_TOKENS + ANSWER_TOKENS) / group.num_ranks
    passes = math.ceil(tokens / group.microbatch_tokens)
    forwards = 2 if group.activations == "recompute" else 1
    operations = (2 + 2 * forwards) * shape.active_parameters * tokens
    computing_s = operations / (kind.tflops * 1e12 * COMPUTE_SHARE)
    gathering_s = 0.0
    if group.strategy.type != "replica" and group.num_ranks > 1:
        copy = group.num_ranks
        if isinstance(group.strategy, Fsdp2Strategy):
            copy = group.strategy.shards_over(group.num_ranks)
        within = nodes == 1 or copy * nodes <= group.num_ranks
        speed = kind.link_gbps if within else min(kind.link_gbps, NETWORK_GBPS)
        size = shape.num_parameters * NUMBER_BYTES[group.dtype]
        gathering_s = passes * (1 + forwards) * size / (speed * GIGA)
    return max(computing_s, gathering_s) + passes * shape.layers * LAYER_S


def _switch_s(config: ClusterConfig, memory: MemoryPlan, kind: DeviceKind) -> float:
    if config.placement.device == "cpu":
        return 0.0
    moved = [
        sum(
            part.bytes * (1 if part.copied else 2)  # what never changes only comes back
            for part in parts
            if part.kept and part.phases and part.phases != ALL
        )
        for parts in memory.parts.values()
    ]
    return max(moved) / (kind.host_gbps * GIGA)
