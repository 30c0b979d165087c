"""The common part of jobs that learn from a dataset: supervised fine-tuning, DPO, reward models.

A job is a client of the controller.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from skyrl_actors.api.client import ControllerClient
from skyrl_actors.config.supervised import Supervised
from skyrl_actors.jobs.adapters import adapter_of
from skyrl_actors.jobs.checkpoints import Checkpoints
from skyrl_actors.jobs.session import ServiceSession, opened
from skyrl_actors.jobs.texts import Prepared
from skyrl_actors.jobs.watcher import RunOutcome, Watcher
from skyrl_actors.messages.model import AdamParams, Role

C = TypeVar("C", bound=Supervised)
T = TypeVar("T")


class SupervisedJob(ABC, Generic[C, T]):
    """A job that trains one model on batches of rows and evaluates it on held-out rows."""

    metric: str  # the metric of held-out rows that selects the best checkpoint
    higher_is_better = False
    role: Role = "policy"

    def __init__(
        self,
        client: ControllerClient,
        config: C,
        rows: Prepared[T],
        watcher: Watcher,
        checkpoints: Checkpoints,
        lora_alpha: float,
    ):
        self.client = client
        self.checkpoints = checkpoints
        self.config: C = config
        self.rows = rows
        self.watcher = watcher
        self.lora_alpha = lora_alpha
        self.session: ServiceSession
        self.model = ""

    async def run(self) -> RunOutcome:
        """Create or load the model, train all steps, and save the final weights."""
        config = self.config
        if self.rows.too_long:
            self.watcher.warned(
                f"{self.rows.too_long} row(s) are left out because they are too long "
                "(job.max_row_tokens)"
            )
        async with opened(self.client, type(config).model_fields["type"].default) as session:
            self.session = session
            if self.checkpoints.resumed:
                self.model = await session.create_from(
                    self.checkpoints.state.models["model"], with_optimizer=True
                )
            elif config.init_from is not None:
                self.model = await session.create_from(config.init_from)
            else:
                self.model = await session.create(
                    self.role, adapter_of(config, self.lora_alpha), config.seed
                )
            await self.prepare()
            return await self._train()

    async def prepare(self) -> None:
        """Create further models, if the job needs them."""

    @abstractmethod
    async def learn(self, items: Sequence[T], adam: AdamParams) -> dict[str, float]:
        """Train one step on a batch, and return its metrics."""

    @abstractmethod
    async def measure(self, items: Sequence[T]) -> dict[str, float]:
        """Return metrics of held-out rows, without training.

        Each metric is a mean over the units that `weight_of` counts.
        """

    def weight_of(self, items: Sequence[T]) -> float:
        """Return the weight of these items in a mean. By default each item counts once."""
        return len(items)

    async def _train(self) -> RunOutcome:
        config = self.config
        done = step = self.checkpoints.state.step
        progress: dict[str, Any] = self.checkpoints.state.job
        before = progress["before"] if self.checkpoints.resumed else await self._evaluate(0)
        latest = progress["latest"] if self.checkpoints.resumed else before
        for step, items in enumerate(self._batches(), 1):
            if step <= done:
                continue
            started = time.perf_counter()
            metrics = await self.learn(items, self._adam(step))
            metrics["seconds/iteration"] = time.perf_counter() - started
            if step % config.eval_every == 0 or step == self.steps:
                latest = await self._evaluate(step)
                metrics |= latest
                await self.checkpoints.evaluated(
                    self.session, step, self.model, latest[self.metric], self.higher_is_better
                )
            self.watcher.step(step, metrics)
            await self.checkpoints.after(
                self.session, step, {"model": self.model}, {"before": before, "latest": latest}
            )
        saved = await self.session.save(self.model, "final")
        return RunOutcome(
            metric=self.metric,
            before=before[self.metric],
            after=latest[self.metric],
            steps=step,
            checkpoint=saved.folder,
            best=self.checkpoints.state.best,
        )

    async def _evaluate(self, step: int) -> dict[str, float]:
        """Return weighted means over batches of held-out rows."""
        sums: dict[str, float] = {}
        total, size = 0.0, self.config.batch_rows
        for start in range(0, len(self.rows.held_out), size):
            items = self.rows.held_out[start : start + size]
            weight = self.weight_of(items)
            for name, value in (await self.measure(items)).items():
                sums[name] = sums.get(name, 0.0) + value * weight
            total += weight
        metrics = {f"eval/{name}": value / total for name, value in sums.items()}
        self.watcher.evaluated(step, metrics)
        return metrics

    @property
    def steps(self) -> int:
        """The number of steps of the whole run."""
        whole = self.config.epochs * -(-len(self.rows.train) // self.config.batch_rows)
        return min(whole, self.config.max_steps or whole)

    def _batches(self) -> Iterator[list[T]]:
        """Yield batches. The order of each epoch depends on the seed.

        The last batch of an epoch may be smaller.
        """
        size, rows = self.config.batch_rows, self.rows.train
        per_epoch = -(-len(rows) // size)
        order: np.ndarray = np.zeros(0, np.int64)
        for number in range(self.steps):
            epoch, place = divmod(number, per_epoch)
            if place == 0:
                order = np.random.default_rng([self.config.seed, epoch]).permutation(len(rows))
            yield [rows[i] for i in order[place * size : (place + 1) * size]]

    def _adam(self, step: int) -> AdamParams:
        config = self.config
        return AdamParams(
            learning_rate=config.lr_share(step, self.steps) * config.learning_rate,
            beta1=config.betas[0],
            beta2=config.betas[1],
            eps=config.eps,
            weight_decay=config.weight_decay,
            grad_clip_norm=config.grad_clip_norm,
            decay_vectors=config.decay_vectors,
        )
