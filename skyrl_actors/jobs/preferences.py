"""Learning from preferences: DPO on the policy, a reward model on a critic.

Both losses couple two rows, and no loss of the registry does. Their gradients with respect to each row's outputs are taken here, from
a forward on the same weights, and applied by losses that are linear in these outputs: −Σ w·log p with w = −∂L/∂ log p, and
½(V − R)² with R = V − ∂L/∂V. What is applied is the gradient of the whole loss, exactly, for the price of one more forward.
"""

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.config.supervised import DpoConfig, RewardModelConfig
from skyrl_actors.jobs.session import CROSS_ENTROPY
from skyrl_actors.jobs.supervised import SupervisedJob
from skyrl_actors.jobs.texts import Pair, Text, critic_rows, policy_rows
from skyrl_actors.messages.model import AdamParams, LoraSpec, LossCall

Floats = NDArray[np.floating]
CRITIC = LossCall("ppo_critic", {})


def logistic(margins: Floats) -> tuple[Floats, Floats]:
    """−log σ(m) and its derivative −σ(−m), for each pair [N] float64."""
    return np.logaddexp(0.0, -margins), -np.exp(-np.logaddexp(0.0, margins))


def both(pairs: Sequence[Pair]) -> list[Text]:
    """Chosen ones first, then the rejected."""
    return [chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs]


def margins_of(per_row: Floats) -> Floats:
    """[2N] of chosen and rejected rows -> [N] differences."""
    half = len(per_row) // 2
    return per_row[:half] - per_row[half:]


def _by_text(flat: Floats, lengths: Sequence[int]) -> list[Floats]:
    return np.split(flat, np.cumsum(lengths)[:-1])


class DpoJob(SupervisedJob[DpoConfig, Pair]):
    """L = −log σ(β·((log π(c) − log π_ref(c)) − (log π(r) − log π_ref(r)))), the mean over pairs (Rafailov et al., 2023, eq. 7)."""

    metric = "eval/loss"
    _reference: str

    async def prepare(self) -> None:
        self._reference = await self.session.create(
            "policy", LoraSpec(1, train_mlp=False, train_unembed=False)
        )  # never trained: the base model

    async def learn(self, items: Sequence[Pair], adam: AdamParams) -> dict[str, float]:
        texts = both(items)
        metrics, slopes = await self._loss(texts)
        signed = np.concatenate([slopes, -slopes]) * self.config.beta / len(items)
        weights = [-slope * text.mask for slope, text in zip(signed, texts, strict=True)]
        _, step = await self.session.train(self.model, policy_rows(texts, weights), CROSS_ENTROPY, adam)
        return metrics | {"policy_grad_norm": step.metrics["skyrl.ai/grad_norm"], "learning_rate": adam.learning_rate}

    async def measure(self, items: Sequence[Pair]) -> dict[str, float]:
        return (await self._loss(both(items)))[0]

    async def _loss(self, texts: Sequence[Text]) -> tuple[dict[str, float], Floats]:
        rows = policy_rows(texts)
        outputs = await asyncio.gather(*(self.session.forward(model, rows) for model in (self.model, self._reference)))
        gains = outputs[0].fields["logprobs"].astype(np.float64) - outputs[1].fields["logprobs"]
        gain = np.asarray(
            [float(g[t.mask].sum()) for g, t in zip(_by_text(gains, [len(t.mask) for t in texts]), texts, strict=True)]
        )
        margins = self.config.beta * margins_of(gain)
        losses, slopes = logistic(margins)
        return _metrics(losses, margins), slopes


class RewardModelJob(SupervisedJob[RewardModelConfig, Pair]):
    """L = −log σ(V(c) − V(r)), the mean over pairs, V the value at an answer's last token (Ouyang et al., 2022, eq. 1)."""

    metric = "eval/pair_accuracy"
    higher_is_better = True
    role = "critic"

    async def learn(self, items: Sequence[Pair], adam: AdamParams) -> dict[str, float]:
        texts = both(items)
        metrics, slopes, values = await self._loss(texts)
        signed = np.concatenate([slopes, -slopes])
        last = [np.arange(len(v)) == len(v) - 1 for v in values]
        fields = {
            "values": values,
            "returns": [v - slope * end for v, slope, end in zip(values, signed, last, strict=True)],
            "weights": [end / len(items) for end in last],
        }
        _, step = await self.session.train(self.model, critic_rows(texts, fields), CRITIC, adam)
        return metrics | {"critic_grad_norm": step.metrics["skyrl.ai/grad_norm"], "learning_rate": adam.learning_rate}

    async def measure(self, items: Sequence[Pair]) -> dict[str, float]:
        return (await self._loss(both(items)))[0]

    async def _loss(self, texts: Sequence[Text]) -> tuple[dict[str, float], Floats, list[Floats]]:
        output = await self.session.forward(self.model, critic_rows(texts, {}), CRITIC)
        values = _by_text(output.fields["values"], [len(t.tokens) for t in texts])
        margins = margins_of(np.asarray([v[-1] for v in values], np.float64))
        losses, slopes = logistic(margins)
        return _metrics(losses, margins), slopes, values


def _metrics(losses: Floats, margins: Floats) -> dict[str, float]:
    """A pair that is even counts half."""
    return {
        "loss": float(losses.mean()),
        "pair_accuracy": float(np.mean((np.sign(margins) + 1) / 2)),
        "margin": float(margins.mean()),
    }
