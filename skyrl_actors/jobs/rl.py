"""Reinforcement learning as a client of the controller.

The job sends the same requests as a Tinker script, without HTTP. An iteration has five steps:

1. Sample episodes (engines awake).
2. Compute current logprobs, logprobs of the reference, and values.
3. Compute advantages.
4. Update the models (engines asleep).
5. Publish the new weights to the engines.

The config selects the algorithm of each step (config/algorithms.py).
"""

import asyncio
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.api.client import ControllerClient
from skyrl_actors.config.job import RlConfig
from skyrl_actors.config.schedules import Asynchronous
from skyrl_actors.jobs import advantages as adv
from skyrl_actors.jobs import kl as divergence
from skyrl_actors.jobs.chat import Chat
from skyrl_actors.jobs.checkpoints import Checkpoints
from skyrl_actors.jobs.environment import TaskSet
from skyrl_actors.jobs.episodes import EpisodeRunner
from skyrl_actors.jobs.rl_models import RlModels
from skyrl_actors.jobs.rollout import Rollout, Weights, answers_only, rows_of
from skyrl_actors.jobs.rollout_source import RolloutSource, distribution, params_of
from skyrl_actors.jobs.schedules import Schedule, schedule_of
from skyrl_actors.jobs.session import ServiceSession, opened
from skyrl_actors.jobs.update import Batch, Updates, adam_of, metrics_of, off_policy
from skyrl_actors.jobs.watcher import RunOutcome, Watcher
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.errors import InternalError
from skyrl_actors.messages.model import LossCall, Role

METRIC = "eval/accuracy"
CUT_WARN = 0.5  # share of answers
MISMATCH_WARN = 0.05  # nats a token between engine and trainer


class RlJob:
    """A reinforcement learning run."""

    def __init__(
        self,
        client: ControllerClient,
        config: RlConfig,
        tasks: TaskSet,
        chat: Chat,
        watcher: Watcher,
        checkpoints: Checkpoints,
        lora_alpha: float,
    ):
        self.client = client
        self.checkpoints = checkpoints
        self.config = config
        self.tasks = tasks
        self.chat = chat
        self.watcher = watcher
        self.lora_alpha = lora_alpha
        self.seconds: dict[str, float] = {}
        self.kl = divergence.Coefficient(config.kl)
        self._weights = Weights("", 0)
        self._had_batch = 0.0
        self._rollout_source: RolloutSource
        self._schedule: Schedule
        self._session: ServiceSession
        self._models: RlModels
        self._evaluator: EpisodeRunner

    async def run(self) -> RunOutcome:
        """Create the models, train for all iterations, and save the final weights."""
        context = (await self.client.calls.get_capabilities()).default.max_sample_tokens
        config = self.config
        schedule = config.schedule
        slices = schedule.slice_tokens if isinstance(schedule, Asynchronous) else None
        runner = EpisodeRunner(self.client, self.chat, config.env, config.overlong, context, slices)
        self._rollout_source = RolloutSource(config, self.tasks, runner, self.watcher.warned)
        # The length penalty is for training only. An evaluation scores the answers.
        unshaped = config.overlong.model_copy(update={"buffer_tokens": 0})
        self._evaluator = EpisodeRunner(self.client, self.chat, config.env, unshaped, context)
        async with opened(self.client, config.type) as session:
            self._session = session
            self._models = RlModels(config, session, self.lora_alpha)
            await self._models.create(
                self.checkpoints.state.models if self.checkpoints.resumed else None
            )
            return await self._train()

    async def _train(self) -> RunOutcome:
        step, progress = self.checkpoints.state.step, self.checkpoints.state.job
        self._weights = Weights(await self._session.sampler(self._models.policy), step)
        if self.checkpoints.resumed:
            before, accuracy, self.kl.value = (
                progress["before"],
                progress["accuracy"],
                progress["kl_coef"],
            )
        else:
            before = accuracy = await self.evaluate(0)
        self._had_batch = time.perf_counter()
        self._schedule = schedule_of(self._rollout_source, lambda: self._weights, progress, step)
        try:
            step, accuracy = await self._iterations(step, before, accuracy)
        finally:
            await self._schedule.close()
        saved = await self._session.save(self._models.policy, "final")
        return RunOutcome(
            metric=METRIC,
            before=before,
            after=accuracy,
            steps=step,
            checkpoint=saved.folder,
            best=self.checkpoints.state.best,
        )

    async def _iterations(self, step: int, before: float, accuracy: float) -> tuple[int, float]:
        config = self.config
        while step < config.iterations:
            if config.stop_at_accuracy is not None and accuracy >= config.stop_at_accuracy:
                self.watcher.warned(
                    f"the run ends after step {step}: the score {accuracy:.4g} reached "
                    "stop_at_accuracy"
                )
                break
            step += 1
            metrics = await self._iteration(step)
            if step % config.eval_every == 0 or step == config.iterations:
                metrics[METRIC] = accuracy = await self.evaluate(step)
                await self.checkpoints.evaluated(
                    self._session, step, self._models.policy, accuracy, higher_is_better=True
                )
            self.watcher.step(step, metrics)
            progress = {
                "before": before,
                "accuracy": accuracy,
                "kl_coef": self.kl.value,
                **self._schedule.state(),
            }
            await self.checkpoints.after(self._session, step, self._models.kept(), progress)
        return step, accuracy

    async def evaluate(self, step: int) -> float:
        """Return the mean reward of greedy answers to held-out prompts.

        Raises:
            InternalError: No episode was completed, or too many failed.
        """
        params = params_of(self.config, 1, 0.0)
        asked = self._weights
        drawn = await self._evaluator.play(lambda: asked, self.tasks.evaluation, params, 0)
        drawn.check(self.config.env)
        if missing := drawn.failures.total() + drawn.long_prompts:
            self.watcher.warned(
                f"the evaluation of step {step} lacks {missing} of {len(self.tasks.evaluation)} "
                f"prompts ({drawn.failure_summary()})"
            )
        if not drawn.rollouts:
            raise InternalError(
                "no held-out prompt could be answered: "
                "all were too long, or their environments failed"
            )
        self._check_cut(step, drawn.rollouts)
        accuracy = float(np.mean([r.reward for r in drawn.rollouts]))
        self.watcher.evaluated(step, {METRIC: accuracy}, drawn.rollouts)
        return accuracy

    def _check_cut(self, step: int, rollouts: list[Rollout]) -> None:
        """Warn if most answers have no end: a reward for a whole answer cannot be reached."""
        cut = float(np.mean([rollout.cut for rollout in rollouts]))
        if cut > CUT_WARN:
            self.watcher.warned(
                f"{cut:.0%} of the answers in the evaluation of step {step} ended at "
                f"job.max_tokens {self.config.max_tokens} or at the end of the context; raise "
                "job.max_tokens if answers need more tokens"
            )

    async def _iteration(self, step: int) -> dict[str, float]:
        self.seconds = {}
        started = time.perf_counter()
        with self._timed("sample"):
            found = await self._schedule.batch(step)
        sampled_s = self.seconds["sample"]
        # Other schedules also sample while the job trains, evaluates and saves.
        if self.config.schedule.type != "on_policy":
            sampled_s, self._had_batch = time.perf_counter() - self._had_batch, time.perf_counter()
        rollouts, metrics = found.rollouts, found.metrics
        if rollouts:
            with self._timed("values_and_reference"):
                batch = await self._score(rollouts)
            with self._timed("advantages"):
                coef = self.kl.value
                metrics |= self._advantages(batch) | off_policy(
                    batch, step, self.config.processed_logprobs
                )
                self._check_mismatch(step, metrics.get("logprob_mismatch", 0.0))
            with self._timed("update"):
                trained = await self._update(batch, step, coef)
            metrics |= trained
            with self._timed("transfer"):
                await self._publish(step)
            rows_tokens = sum(len(r.tokens) for r in rollouts)
            metrics["train_tokens_per_s"] = (
                len(self._models.trained_roles(step))
                * self.config.epochs
                * rows_tokens
                / self.seconds["update"]
            )
        else:
            self.watcher.warned(
                f"iteration {step}: no episodes to train on; the policy does not change"
            )
            self._weights = replace(self._weights, iteration=step)
            self._schedule.published()
        self.seconds["iteration"] = time.perf_counter() - started
        metrics["sample_tokens_per_s"] = metrics["sampled_tokens"] / sampled_s
        return metrics | {f"seconds/{name}": seconds for name, seconds in self.seconds.items()}

    async def _score(self, rollouts: list[Rollout]) -> Batch:
        """Compute current logprobs, and values and logprobs of the reference if they are used."""
        rows = rows_of(rollouts, {})

        async def read(model_id: str, loss: LossCall, field: str) -> list[NDArray[np.float32]]:
            return answers_only(
                rollouts, (await self._session.forward(model_id, rows, loss)).fields[field]
            )

        scoring = LossCall("cross_entropy", distribution(self.config))
        wanted = {"logprobs": read(self._models.policy, scoring, "logprobs")}
        if self._models.critic:
            wanted["values"] = read(self._models.critic, LossCall("ppo_critic", {}), "values")
        if self._models.reference:
            wanted["reference"] = read(self._models.reference, scoring, "logprobs")
        found = dict(zip(wanted, await asyncio.gather(*wanted.values()), strict=True))
        return Batch(
            rollouts=rollouts,
            logprobs=found["logprobs"],
            values=found.get("values"),
            reference=found.get("reference"),
        )

    def _advantages(self, batch: Batch) -> dict[str, float]:
        term = self.config.kl
        rewards = [r.rewards for r in batch.rollouts]
        metrics = {"kl_coef": self.kl.value} if term.place != "none" else {}
        if batch.reference is not None:
            metrics["kl"] = float(
                np.mean(
                    divergence.estimate(
                        batch.flat(batch.logprobs), batch.flat(batch.reference), "k3"
                    )
                )
            )
            if term.place == "reward":
                pairs = zip(rewards, batch.logprobs, batch.reference, batch.sampled(), strict=True)
                rewards = [
                    np.where(
                        s, divergence.token_rewards(r, p, ref, term.estimator, self.kl.value), r
                    )
                    for r, p, ref, s in pairs
                ]
            self.kl.update(metrics["kl"], len(batch.rollouts))
        found = adv.estimate(
            self.config.advantage,
            adv.Scored(
                rewards=rewards,
                groups=batch.groups,
                sampled=batch.sampled(),
                values=batch.values,
                logprobs=batch.logprobs,
                reference=batch.reference,
            ),
        )
        batch.advantages, batch.returns = found.advantages, found.returns
        if batch.values is not None and found.returns is not None:
            returns = [r.astype(np.float32) for r in found.returns]
            metrics["explained_variance"] = adv.explained_variance(
                batch.flat(batch.values), batch.flat(returns)
            )
        return metrics

    def _check_mismatch(self, step: int, mismatch: float) -> None:
        """Warn about a large mismatch of the logprobs of engine and trainer.

        Raises:
            InternalError: The mismatch is above mismatch_stop. Updates would then learn from
                numerical differences.
        """
        stop = self.config.mismatch_stop
        text = f"iteration {step}: engine and trainer differ by {mismatch:.2g} nats per token"
        if stop is not None and mismatch > stop:
            raise InternalError(
                f"{text}, more than job.mismatch_stop {stop:g}; "
                "the samples of this iteration were not trained on"
            )
        if mismatch > MISMATCH_WARN:
            self.watcher.warned(f"{text}, more than {MISMATCH_WARN}")

    async def _update(self, batch: Batch, step: int, kl_coef: float) -> dict[str, float]:
        """Run all epochs. Critic and policy train at the same time."""
        updates = Updates(
            self.config, batch, kl_coef, self.config.max_tokens * self.config.env.turns
        )
        found = await asyncio.gather(
            *(self._optimize(updates, role, step) for role in self._models.trained_roles(step))
        )
        return {name: value for metrics in found for name, value in metrics.items()}

    async def _optimize(self, updates: Updates, role: Role, step: int) -> dict[str, float]:
        model_id = self._models.policy if role == "policy" else self._models.critic
        adam = adam_of(self.config, role, step)
        done: list[tuple[rs.LossOutput, rs.StepDone]] = []
        tokens = 0
        for part in updates.minibatches(step):
            done.append(await self._session.train(model_id, *updates.call(role, part), adam))
            tokens += updates.tokens(part)
        return metrics_of(role, done, tokens) if done else {}

    async def _publish(self, step: int) -> None:
        await self._models.move_reference(step)
        self._weights = Weights(await self._session.sampler(self._models.policy), step)
        self._schedule.published()

    @contextmanager
    def _timed(self, name: str) -> Generator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started
