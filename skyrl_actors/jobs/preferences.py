"""Learn from preferences: DPO trains the policy, a reward model trains a critic.

Both losses combine two rows. The losses of the registry handle each row alone, so the gradient is
computed here: a forward pass on the same weights gives the outputs of each row, and ∂L/∂output
follows. Registered losses then apply it: −Σ w·log p with w = −∂L/∂ log p, and
½(V − R)² with R = V − ∂L/∂V. The result is the exact gradient of the whole loss, at the cost of
one more forward pass.
"""

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.config.supervised import DpoConfig, RewardModelConfig
from skyrl_actors.jobs.adapters import untrained_adapter
from skyrl_actors.jobs.session import CROSS_ENTROPY
from skyrl_actors.jobs.supervised import SupervisedJob
from skyrl_actors.jobs.texts import Pair, Text, critic_rows, policy_rows
from skyrl_actors.messages.model import AdamParams, LossCall

Floats = NDArray[np.floating]
CRITIC = LossCall("ppo_critic", {})


def logistic(margins: Floats) -> tuple[Floats, Floats]:
    """Return −log σ(m) and its derivative −σ(−m), for each pair [N] float64."""
    return np.logaddexp(0.0, -margins), -np.exp(-np.logaddexp(0.0, margins))


def both(pairs: Sequence[Pair]) -> list[Text]:
    """Return all chosen texts, then all rejected texts."""
    return [chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs]


def margins_of(per_row: Floats) -> Floats:
    """Return the differences [N] between chosen and rejected rows [2N]."""
    half = len(per_row) // 2
    return per_row[:half] - per_row[half:]


def _by_text(flat: Floats, lengths: Sequence[int]) -> list[Floats]:
    return np.split(flat, np.cumsum(lengths)[:-1])


class DpoJob(SupervisedJob[DpoConfig, Pair]):
    """Direct preference optimization (Rafailov et al., 2023, eq. 7).

    L is the mean over pairs of −log σ(β·(gain(c) − gain(r))), where gain is log π − log π_ref. The
    reference is what the policy began with: the base model, or `init_from`.
    """

    metric = "eval/loss"
    _reference: str

    async def prepare(self) -> None:
        if self.config.init_from is not None:
            self._reference = await self.session.create_from(self.config.init_from)
            return
        self._reference = await self.session.create("policy", untrained_adapter(self.config))

    async def learn(self, items: Sequence[Pair], adam: AdamParams) -> dict[str, float]:
        texts = both(items)
        metrics, slopes = await self._loss(texts)
        signed = np.concatenate([slopes, -slopes]) * self.config.beta / len(items)
        weights = [-slope * text.mask for slope, text in zip(signed, texts, strict=True)]
        _, step = await self.session.train(
            self.model, policy_rows(texts, weights), CROSS_ENTROPY, adam
        )
        return metrics | {
            "policy_grad_norm": step.metrics["skyrl.ai/grad_norm"],
            "learning_rate": adam.learning_rate,
        }

    async def measure(self, items: Sequence[Pair]) -> dict[str, float]:
        return (await self._loss(both(items)))[0]

    async def _loss(self, texts: Sequence[Text]) -> tuple[dict[str, float], Floats]:
        rows = policy_rows(texts)
        outputs = await asyncio.gather(
            *(self.session.forward(model, rows) for model in (self.model, self._reference))
        )
        gains = outputs[0].fields["logprobs"].astype(np.float64) - outputs[1].fields["logprobs"]
        gain = np.asarray(
            [
                float(g[t.mask].sum())
                for g, t in zip(_by_text(gains, [len(t.mask) for t in texts]), texts, strict=True)
            ]
        )
        margins = self.config.beta * margins_of(gain)
        losses, slopes = logistic(margins)
        return _metrics(losses, margins), slopes


class RewardModelJob(SupervisedJob[RewardModelConfig, Pair]):
    """Train a reward model from pairs (Ouyang et al., 2022, eq. 1).

    L = −log σ(V(c) − V(r)), the mean over pairs. V is the value at an answer's last token.
    """

    metric = "eval/pair_accuracy"
    higher_is_better = True
    role = "critic"

    async def learn(self, items: Sequence[Pair], adam: AdamParams) -> dict[str, float]:
        texts = both(items)
        metrics, slopes, values = await self._loss(texts)
        signed = np.concatenate([slopes, -slopes])
        last = [np.arange(len(v)) == len(v) - 1 for v in values]
        fields: dict[str, Sequence[Floats]] = {
            "values": values,
            "returns": [
                v - slope * end for v, slope, end in zip(values, signed, last, strict=True)
            ],
            "weights": [end / len(items) for end in last],
        }
        _, step = await self.session.train(self.model, critic_rows(texts, fields), CRITIC, adam)
        return metrics | {
            "critic_grad_norm": step.metrics["skyrl.ai/grad_norm"],
            "learning_rate": adam.learning_rate,
        }

    async def measure(self, items: Sequence[Pair]) -> dict[str, float]:
        return (await self._loss(both(items)))[0]

    async def _loss(self, texts: Sequence[Text]) -> tuple[dict[str, float], Floats, list[Floats]]:
        output = await self.session.forward(self.model, critic_rows(texts, {}), CRITIC)
        values = _by_text(output.fields["values"], [len(t.tokens) for t in texts])
        margins = margins_of(np.asarray([v[-1] for v in values], np.float64))
        losses, slopes = logistic(margins)
        return _metrics(losses, margins), slopes, values


def _metrics(losses: Floats, margins: Floats) -> dict[str, float]:
    """Return the metrics of a batch. A pair with margin 0 counts half in the accuracy."""
    return {
        "loss": float(losses.mean()),
        "pair_accuracy": float(np.mean((np.sign(margins) + 1) / 2)),
        "margin": float(margins.mean()),
    }
