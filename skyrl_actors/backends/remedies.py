"""Find changes of a config that let its memory plan fit (pure).

A change is written as overrides, and is only suggested if the config accepts them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from omegaconf import OmegaConf
from pydantic import ValidationError

from skyrl_actors.config.cluster import ClusterConfig

STEP_BYTES = 256 * 2**20
SHORTER = 4_096  # tokens of a context
LOWER_RANK = 32  # the usual one of adapters
Fits = Callable[[ClusterConfig], bool]
Change = tuple[str, ...]  # overrides


def changed(config: ClusterConfig, overrides: Sequence[str]) -> ClusterConfig | None:
    """Return the config with these overrides, or None if it refuses them."""
    plain = OmegaConf.create(config.model_dump(mode="json", exclude_unset=True))
    merged = OmegaConf.merge(plain, OmegaConf.from_dotlist(list(overrides)))
    try:
        return ClusterConfig.model_validate(cast("object", OmegaConf.to_container(merged)))
    except ValidationError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the config of a service comes from, so that changes can be typed.

    `key` comes before its keys. Overrides can be appended to `command`. `changed` returns the
    config with overrides, or None if they are refused.
    """

    key: str = ""
    command: str = ""
    changed: Callable[[ClusterConfig, Sequence[str]], ClusterConfig | None] = changed

    def advice(self, changes: Sequence[Change]) -> list[str]:
        """Return the alternatives as texts."""
        return [" ".join(f"{self.key}{one}" for one in change) for change in changes]


def remedies(config: ClusterConfig, source: Source, fits: Fits, over_engine: int) -> list[Change]:
    """Return single changes that suffice, or if none does, the fewest of them that do together.

    `over_engine`: bytes that a device with an engine lacks. Nothing is returned if no change helps.
    """

    def made(changes: Sequence[Change]) -> ClusterConfig | None:
        return source.changed(config, [override for change in changes for override in change])

    def suffices(changes: Sequence[Change]) -> bool:
        found = made(changes)
        return found is not None and fits(found)

    changes = [change for change in _changes(config, over_engine) if change]
    if alone := [change for change in changes if suffices([change])]:
        return alone

    def together(tried: Sequence[Change]) -> list[Change]:
        taken: list[Change] = []
        for change in tried:
            if made([*taken, change]) is not None:
                taken.append(change)
            if suffices(taken):
                break
        else:
            return []
        for change in list(taken):
            if suffices(fewer := [one for one in taken if one != change]):
                taken = fewer
        return [tuple(override for change in taken for override in change)]

    # A cache that is too small for one sequence would spoil the others.
    others = [change for change in changes if not change[0].startswith("engine.kv_cache_bytes")]
    return together(changes) or together(others)


def _changes(config: ClusterConfig, over_engine: int) -> Iterator[Change]:
    """Yield changes in the order in which they are preferred, without those already made."""
    kv = config.engine.kv_cache_bytes
    # With other changes a part of the cache can fit, even if now none would.
    kv = (kv - over_engine if kv > over_engine else kv // 8) // STEP_BYTES * STEP_BYTES
    if over_engine > 0 and kv > 0:
        yield (f"engine.kv_cache_bytes={kv}",)
    trains_all = config.lora.max_full_models > 0
    if trains_all:
        yield ("lora.max_full_models=0",)
    groups = {"policy": config.policy} | ({"critic": config.critic} if config.critic else {})
    yield tuple(
        f"{role}.activations=recompute"
        for role, group in groups.items()
        if group.activations == "keep"
    )
    if config.lora.max_rank > LOWER_RANK:
        yield (f"lora.max_rank={LOWER_RANK}",)
    if config.lora.max_adapters > 1:
        yield ("lora.max_adapters=1",)
    if config.placement.device == "gpu":
        dtypes = {role: group.dtype for role, group in groups.items()}
        dtypes["engine"] = config.engine.dtype
        yield tuple(f"{r}.dtype=bfloat16" for r, dtype in dtypes.items() if dtype == "float32")
        several = [role for role, group in groups.items() if group.num_ranks > 1]
        if trains_all:
            yield tuple(f"{role}.full_strategy.type=fsdp2" for role in several)
            yield tuple(
                override
                for role in groups
                for override in (
                    f"{role}.full_strategy.type=fsdp2",
                    f"{role}.full_strategy.offload=all",
                )
            )
        yield tuple(f"{role}.strategy.type=fsdp2" for role in several)
    yield tuple(
        f"{role}.microbatch_tokens={max(1, group.microbatch_tokens // 4)}"
        for role, group in groups.items()
    )
    if config.critic is not None:  # after all its keys, which would bring it back
        yield ("critic=null",)
    if config.engine.max_model_len > SHORTER:
        yield (f"engine.max_model_len={SHORTER}",)
    if over_engine > 0 and kv > 0:
        yield (f"engine.kv_cache_bytes={kv // 4}",)
