"""PPO with a critic as a client of the controller: the same requests any Tinker script sends, without HTTP.

One iteration: sample (engine awake) → values, current and reference logprobs → advantages → critic and policy updates
(engine asleep) → new weights to the engine → sample.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.api.client import ControllerClient
from skyrl_actors.config.job import PpoConfig
from skyrl_actors.jobs import advantages as adv
from skyrl_actors.jobs.envs import ReverseTasks
from skyrl_actors.jobs.rollouts import Chat, Rollout, answers_only, roll_out, rows_of
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.errors import InternalError
from skyrl_actors.messages.model import AdamParams, LoraSpec, LossCall, ModelSpec, Role
from skyrl_actors.messages.paths import model_id_for, sampler_id_for

HEARTBEAT_S = 30.0
CROSS_ENTROPY = LossCall("cross_entropy", {})


class Watcher(Protocol):
    """Who is told how the run goes (terminal, tracker)."""

    def iteration(self, step: int, metrics: dict[str, float]) -> None: ...

    def evaluated(self, step: int, accuracy: float, rollouts: Sequence[Rollout]) -> None: ...

    def warned(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    accuracy_before: float
    accuracy_after: float
    iterations: int
    checkpoint: str


@dataclass
class Batch:
    """Rollouts with everything the updates need; each list holds one array [R] for each rollout."""

    rollouts: list[Rollout]
    logprobs: list[NDArray[np.float32]]
    values: list[NDArray[np.float32]]
    advantages: list[NDArray[np.floating]] = field(default_factory=list)
    returns: list[NDArray[np.floating]] = field(default_factory=list)


class PpoJob:
    def __init__(self, client: ControllerClient, config: PpoConfig, watcher: Watcher, lora_alpha: float):
        self.client = client
        self.lora_alpha = lora_alpha
        self.config = config
        self.watcher = watcher
        self.tasks = ReverseTasks(config.env, config.seed)
        self.seconds: dict[str, float] = {}
        self._versions = 0
        self._chat: Chat
        self._session: str
        self._policy: str
        self._critic: str
        self._reference: str
        self._sampler: str

    async def run(self) -> Outcome:
        capabilities = await self.client.capabilities()
        self._chat = await asyncio.to_thread(Chat, capabilities.base_folder)
        self._session = await self.client.create_session({"job": "ppo"})
        beating = asyncio.create_task(self._heartbeat())
        try:
            await self._create_models(capabilities.base_model)
            return await self._train()
        finally:
            beating.cancel()
            await self.client.finish_session(self._session)

    async def _create_models(self, base_model: str) -> None:
        rank = self.config.lora_rank
        lora = None if rank is None else LoraSpec(rank, self.lora_alpha)
        self._policy = await self._create(0, ModelSpec("", base_model, "policy", lora, self.config.seed))
        self._critic = await self._create(1, ModelSpec("", base_model, "critic", lora, self.config.seed + 1))
        # An adapter that is never trained is the base model itself: the reference costs no copy of the weights.
        self._reference = await self._create(2, ModelSpec("", base_model, "policy", LoraSpec(1)))

    async def _create(self, number: int, spec: ModelSpec) -> str:
        model_id = model_id_for(self._session, number)
        own = ModelSpec(model_id, spec.base_model, spec.role, spec.lora, spec.seed)
        await self.client.run(rq.CreateModel(own, self._session), rs.ModelCreated)
        return model_id

    async def _train(self) -> Outcome:
        config = self.config
        await self._publish()
        before = accuracy = await self.evaluate(0)
        step = 0
        for step in range(1, config.iterations + 1):
            metrics = await self._iteration(step)
            if step % config.eval_every == 0 or step == config.iterations:
                accuracy = await self.evaluate(step)
                metrics["eval/accuracy"] = accuracy
            self.watcher.iteration(step, metrics)
            if accuracy >= config.stop_at_accuracy:
                break
        saved = await self.client.run(rq.SaveWeights(self._policy, "final"), rs.Saved)
        return Outcome(before, accuracy, step, saved.folder)

    async def evaluate(self, step: int) -> float:
        """Held-out greedy accuracy."""
        params = rq.SamplingParams(self.config.max_tokens, temperature=0.0)
        rollouts = await roll_out(self.client, self._chat, self._sampler, self.tasks.evaluation, params, 0)
        accuracy = float(np.mean([r.reward for r in rollouts]))
        self.watcher.evaluated(step, accuracy, rollouts)
        return accuracy

    async def _iteration(self, step: int) -> dict[str, float]:
        self.seconds = {}
        started = time.perf_counter()
        config = self.config
        with self._timed("sample"):
            tasks = self.tasks.batch(config.prompts, config.seed * 100_003 + step)
            params = rq.SamplingParams(config.max_tokens, config.samples_per_prompt, config.temperature)
            rollouts = await roll_out(self.client, self._chat, self._sampler, tasks, params, config.seed * 100_003 + step)
        with self._timed("values_and_reference"):
            batch, reference = await self._score(rollouts)
        with self._timed("advantages"):
            metrics = self._advantages(batch, reference)
            self._check_mismatch(step, metrics["logprob_mismatch"])
        with self._timed("update"):
            metrics |= await self._update(batch, step)
        with self._timed("transfer"):
            await self._publish()
        answer_tokens = sum(len(r.answer) for r in rollouts)
        rows_tokens = sum(len(r.tokens) for r in rollouts)
        self.seconds["iteration"] = time.perf_counter() - started
        metrics |= {
            "sample_tokens_per_s": answer_tokens / self.seconds["sample"],
            "train_tokens_per_s": len(self._trained_roles(step)) * config.epochs * rows_tokens / self.seconds["update"],
            **{f"seconds/{name}": seconds for name, seconds in self.seconds.items()},
        }
        return metrics

    async def _score(self, rollouts: list[Rollout]) -> tuple[Batch, list[NDArray[np.float32]]]:
        """Current logprobs, values, and the reference's logprobs, each [R] a rollout."""
        rows = rows_of(rollouts, {})
        policy, critic, reference = await asyncio.gather(
            self._forward(self._policy, rows), self._forward(self._critic, rows), self._forward(self._reference, rows)
        )
        cut = lambda output, name: answers_only(rollouts, output.fields[name])  # noqa: E731
        return Batch(rollouts, cut(policy, "logprobs"), cut(critic, "values")), cut(reference, "logprobs")

    async def _forward(self, model_id: str, rows: Columns) -> rs.LossOutput:
        loss = LossCall("ppo_critic", {}) if model_id == self._critic else CROSS_ENTROPY
        return await self.client.run(rq.ForwardBackward(model_id, rows, loss, forward_only=True), rs.LossOutput)

    def _advantages(self, batch: Batch, reference: list[NDArray[np.float32]]) -> dict[str, float]:
        config = self.config
        for rollout, logprobs, ref, values in zip(batch.rollouts, batch.logprobs, reference, batch.values, strict=True):
            rewards = adv.token_rewards(rollout.reward, logprobs, ref, config.kl_coef)
            advantages, returns = adv.gae(rewards, values, config.gamma, config.gae_lambda)
            batch.advantages.append(advantages)
            batch.returns.append(returns)
        batch.advantages = adv.whiten(batch.advantages)
        flat = np.concatenate
        engine = flat([r.logprobs for r in batch.rollouts])
        return {
            "reward": float(np.mean([r.reward for r in batch.rollouts])),
            "kl": adv.kl_estimate(flat(batch.logprobs), flat(reference)),
            "explained_variance": adv.explained_variance(flat(batch.values), flat(batch.returns)),
            "logprob_mismatch": float(np.mean(np.abs(engine - flat(batch.logprobs)))),
            "logprob_mismatch_max": float(np.max(np.abs(engine - flat(batch.logprobs)))),
            "answer_tokens": float(np.mean([len(r.answer) for r in batch.rollouts])),
        }

    def _check_mismatch(self, step: int, mismatch: float) -> None:
        """Raises InternalError beyond mismatch_stop: updates would learn from the difference of two programs."""
        stop, text = self.config.mismatch_stop, f"iteration {step}: engine and trainer differ by {mismatch:.2g} nats a token"
        if stop is not None and mismatch > stop:
            raise InternalError(f"{text}, more than job.mismatch_stop {stop:g}; this iteration's samples were not learned from")
        if mismatch > self.config.mismatch_warn:
            self.watcher.warned(f"{text} (job.mismatch_warn {self.config.mismatch_warn:g})")

    async def _update(self, batch: Batch, step: int) -> dict[str, float]:
        """All epochs of critic and policy; the two groups work at the same time."""
        parts = list(self._minibatches(len(batch.rollouts), step))
        roles = self._trained_roles(step)
        share = 1 - (1 - self.config.final_lr_share) * (step - 1) / max(1, self.config.iterations - 1)
        merged: dict[str, float] = {}
        for metrics in await asyncio.gather(*(self._optimize(batch, parts, role, share) for role in roles)):
            merged |= metrics
        return merged

    def _trained_roles(self, step: int) -> list[Role]:
        return ["critic"] if step <= self.config.critic_warmup else ["policy", "critic"]

    def _minibatches(self, count: int, seed: int) -> Iterator[list[int]]:
        rng = np.random.default_rng([self.config.seed, seed])
        for _ in range(self.config.epochs):
            yield from (part.tolist() for part in np.array_split(rng.permutation(count), self.config.minibatches) if len(part))

    async def _optimize(self, batch: Batch, parts: list[list[int]], role: Role, lr_share: float) -> dict[str, float]:
        config = self.config
        model_id = self._policy if role == "policy" else self._critic
        rate = lr_share * (config.policy_lr if role == "policy" else config.critic_lr)
        adam = AdamParams(rate, config.beta1, config.beta2, config.eps, config.weight_decay, config.grad_clip_norm)
        sums: dict[str, float] = {}
        tokens, norms = 0, []
        for part in parts:
            count = sum(len(batch.advantages[i]) for i in part)
            rows, loss = (self._policy_rows if role == "policy" else self._critic_rows)(batch, part, count)
            # The step is sent once the batch was accepted: its place in the order is then certain.
            batch_id = await self.client.submit(rq.ForwardBackward(model_id, rows, loss))
            step_id = await self.client.submit(rq.OptimStep(model_id, adam))
            output = await self.client.result(batch_id, rs.LossOutput)
            step = await self.client.result(step_id, rs.StepDone)
            for name, value in output.metrics.items():
                sums[name] = sums.get(name, 0.0) + value
            tokens += count
            norms.append(step.metrics["skyrl.ai/grad_norm"])
        if role == "policy":
            return {"policy_loss": sums["loss:sum"] / len(parts), "clip_fraction": sums["clipped_tokens:sum"] / tokens,
                    "policy_grad_norm": float(np.mean(norms))}  # fmt: skip
        return {"value_loss": sums["squared_error:sum"] / tokens, "value_clip_fraction": sums["clipped_values:sum"] / tokens,
                "critic_grad_norm": float(np.mean(norms))}  # fmt: skip

    def _policy_rows(self, batch: Batch, part: list[int], count: int) -> tuple[Columns, LossCall]:
        """Losses are sums: dividing the advantages by the token count gives the mean."""
        rows = rows_of(
            [batch.rollouts[i] for i in part],
            {"logprobs": [batch.logprobs[i] for i in part], "advantages": [batch.advantages[i] / count for i in part]},
        )
        config = self.config
        options: dict[str, float | str] = {
            "clip_low_threshold": config.clip_low_threshold,
            "clip_high_threshold": config.clip_high_threshold,
        }
        return rows, LossCall("ppo", options)

    def _critic_rows(self, batch: Batch, part: list[int], count: int) -> tuple[Columns, LossCall]:
        rows = rows_of(
            [batch.rollouts[i] for i in part],
            {
                "values": [batch.values[i] for i in part],
                "returns": [batch.returns[i] for i in part],
                "weights": [np.full(len(batch.values[i]), 1 / count) for i in part],
            },
            with_targets=False,
        )
        return rows, LossCall("ppo_critic", {"value_clip": self.config.value_clip})

    async def _publish(self) -> None:
        sampler_id = sampler_id_for(self._session, self._versions)
        self._versions += 1
        await self.client.run(rq.SaveForSampler(self._policy, sampler_id=sampler_id), rs.SamplerSaved)
        self._sampler = sampler_id

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self.client.heartbeat(self._session)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started
