"""Bring the base model to every node that has slots of the service, before processes start."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from placement.reserve import node_ids
from skyrl_actors.config.base_models import MadeBase
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.messages.errors import ConfigError, InternalError, SkyrlActorsError
from skyrl_actors.remote import ask
from skyrl_actors.storage.base_copy import Arrived, BaseCopy, bring, described

SILENT_S = 120.0  # longest pause of a node's reports
STALLED_S = 600.0  # longest time in which a download gets no byte
REPORT_S = 10.0
GB = 1e9


class NodeBases:
    """The nodes that have the base model."""

    def __init__(
        self,
        config: ClusterConfig,
        folder: Path,
        reserved: PlacementGroup,
        report: Callable[[str], None],
    ):
        base = config.base_model
        self._folder = folder
        on_hub = not isinstance(base, MadeBase) and base.path is None
        self._name = base.name if on_hub else None
        self._is_made_here = isinstance(base, MadeBase)
        self._reserved = reserved
        self._environment = dict(config.environment)
        self._report = report
        self._complete = {cast(Any, ray).get_runtime_context().get_node_id()}

    async def ensure(self) -> None:
        """Bring the model to nodes that do not have it yet.

        Raises:
            ConfigError: A node cannot get it.
            InternalError: A node does not answer, or its download stands still.
        """
        nodes = await ask(node_ids, self._reserved)
        if absent := sorted(nodes.keys() - self._complete):
            copy = await asyncio.to_thread(described, self._folder, self._name, self._is_made_here)
            await asyncio.gather(*(self._bring(copy, node, nodes[node]) for node in absent))

    async def _bring(self, copy: BaseCopy, node: str, host: str) -> None:
        began, said = time.monotonic(), 0.0
        moved, moved_at = -1, began
        async with aclosing(self._reports(copy, node, host)) as reports:
            async for arrived in reports:
                now = time.monotonic()
                if arrived.num_bytes != moved:
                    moved, moved_at = arrived.num_bytes, now
                if now - moved_at > STALLED_S:
                    raise InternalError(
                        f"the download of the base model on node {host} got no byte for "
                        f"{STALLED_S:.0f} s; it has {moved / GB:.2f} GB"
                    )
                if now - said > REPORT_S:
                    said = now
                    self._report(
                        f"base model on node {host}: {arrived.num_bytes / GB:.2f} of "
                        f"{arrived.total_bytes / GB:.2f} GB"
                    )
        if moved >= 0:
            self._report(f"base model on node {host}: complete ({time.monotonic() - began:.0f} s)")
        self._complete.add(node)

    async def _reports(self, copy: BaseCopy, node: str, host: str) -> AsyncGenerator[Arrived]:
        """Yield a node's reports, until the model is complete there."""
        task = (
            cast(Any, ray)
            .remote(_bring_here)
            .options(
                num_cpus=0,
                num_returns="streaming",
                max_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                runtime_env={"env_vars": self._environment} if self._environment else None,
            )
        )
        reports, complete = task.remote(copy, host), False
        try:
            while True:
                async with asyncio.timeout(SILENT_S):
                    arrived = await (await anext(reports))
                yield arrived
        except StopAsyncIteration:
            complete = True
        except TimeoutError:
            raise InternalError(
                f"node {host} did not report on the base model for {SILENT_S:.0f} s"
            ) from None
        except RayTaskError as error:
            cause: Any = getattr(error, "cause", None)
            if isinstance(cause, SkyrlActorsError):
                raise ConfigError(str(cause)) from None
            raise InternalError(f"node {host} cannot get the base model: {error}") from None
        finally:
            if not complete:  # a download that nobody awaits would go on
                cast(Any, ray).cancel(reports, force=True)


def _bring_here(copy: BaseCopy, host: str) -> Iterator[Arrived]:
    yield from bring(copy, host)
