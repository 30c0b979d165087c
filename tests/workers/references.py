"""Reference results for ranks: plain transformers in float64, one row at a time."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from skyrl_actors import losses
from skyrl_actors.losses.torch_ops import TorchOps
from skyrl_actors.messages.columns import Columns, columns_from
from skyrl_actors.messages.example import TARGETS, Example

VOCAB = 128


def batch(
    seed: int,
    lengths: tuple[int, ...],
    extra: tuple[str, ...] = (),
    targets: bool = True,
    vocab: int = VOCAB,
) -> Columns:
    """Return random columns.

    Weights are real numbers, and 0 at about a third of the positions, as in prompts.
    """
    rng = np.random.default_rng(seed)
    examples = []
    for n in lengths:
        weights = rng.normal(0.5, 1, n) * (rng.random(n) > 0.3)
        fields: dict = {TARGETS: rng.integers(0, vocab, n).astype(np.int32)} if targets else {}
        fields["weights"] = weights.astype(np.float32)
        centre = -float(np.log(vocab))
        fields |= {
            name: rng.normal(centre if name == "logprobs" else 0, 0.5, n).astype(np.float32)
            for name in extra
        }
        examples.append(Example(rng.integers(0, vocab, n).astype(np.int32), fields))
    return columns_from(examples)


def inputs_of(name: str) -> tuple[str, ...]:
    return losses.REGISTRY[name].required


class Reference:
    """A float64 model that accumulates gradients."""

    def __init__(self, folder: Path, value_head: Tensor | None = None):
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
        self.model.eval()  # without dropout
        self.value_weight = (
            None if value_head is None else torch.nn.Parameter(value_head.double().clone())
        )
        self.value_bias = (
            None if value_head is None else torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        )

    def rows(self, columns: Columns) -> list[Tensor]:
        """Return logprobs of targets, or values, of each row."""
        found = []
        for i in range(columns.num_rows):
            where = columns.positions([i])
            tokens = torch.tensor(columns.tokens[where][None].astype(np.int64))
            if self.value_weight is not None and self.value_bias is not None:
                hidden = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state[0]
                found.append((hidden @ self.value_weight.t() + self.value_bias)[:, 0])
                continue
            logits = self.model(input_ids=tokens, use_cache=False).logits[0]
            targets = torch.tensor(columns.fields[TARGETS][where].astype(np.int64))
            found.append(F.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0])
        return found

    def backward(self, name: str, columns: Columns, **options: float) -> float:
        """Add the gradient of the summed loss, by the registry's loss function in float64."""
        entry = losses.find(name)
        total = torch.zeros((), dtype=torch.float64)
        for i, predicted in enumerate(self.rows(columns)):
            where = columns.positions([i])
            inputs = {
                key: torch.full_like(predicted, value, requires_grad=False)
                for key, value in entry.optional.items()
            }
            inputs |= {
                k: torch.tensor(v[where], dtype=torch.float64)
                for k, v in columns.fields.items()
                if k != TARGETS
            }
            call = entry.checked(options)
            total = (
                total
                + entry.terms(
                    TorchOps([len(predicted)]), predicted, inputs, call.config
                ).elementwise.sum()
            )
        total.backward()
        return float(total.detach())

    def gradients(self) -> dict[str, Tensor]:
        found = {
            name: p.grad if p.grad is not None else torch.zeros_like(p)
            for name, p in self.model.named_parameters()
        }
        if self.value_weight is not None and self.value_bias is not None:
            assert self.value_weight.grad is not None and self.value_bias.grad is not None
            found |= {
                "value_head.weight": self.value_weight.grad,
                "value_head.bias": self.value_bias.grad,
            }
        return found

    def clear(self) -> None:
        self.model.zero_grad()
        for parameter in (self.value_weight, self.value_bias):
            if parameter is not None:
                parameter.grad = None


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-12))
