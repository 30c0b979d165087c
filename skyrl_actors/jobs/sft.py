"""Supervised fine-tuning: the mean cross-entropy of a batch's answer tokens."""

from collections.abc import Sequence

import numpy as np

from skyrl_actors.config.supervised import SftConfig
from skyrl_actors.jobs.session import CROSS_ENTROPY
from skyrl_actors.jobs.supervised import SupervisedJob
from skyrl_actors.jobs.texts import Text, policy_rows
from skyrl_actors.messages.model import AdamParams


class SftJob(SupervisedJob[SftConfig, Text]):
    """Supervised fine-tuning of the policy."""

    metric = "eval/nll"

    def weight_of(self, items: Sequence[Text]) -> float:
        return float(sum(text.mask.sum() for text in items))

    async def learn(self, items: Sequence[Text], adam: AdamParams) -> dict[str, float]:
        count = self.weight_of(items)
        rows = policy_rows(items, [text.mask / count for text in items])
        output, step = await self.session.train(self.model, rows, CROSS_ENTROPY, adam)
        return {
            "nll": output.metrics["loss:sum"],
            "policy_grad_norm": step.metrics["skyrl.ai/grad_norm"],
            "learning_rate": adam.learning_rate,
        }

    async def measure(self, items: Sequence[Text]) -> dict[str, float]:
        output = await self.session.forward(self.model, policy_rows(items))
        mask = np.concatenate([text.mask for text in items])
        return {"nll": -float(np.mean(output.fields["logprobs"][mask], dtype=np.float64))}
