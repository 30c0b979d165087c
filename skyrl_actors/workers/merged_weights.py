"""The base's weights with an adapter added, as the base's files hold them."""

from collections.abc import Mapping
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor

from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.model import LoraSpec
from skyrl_actors.workers.adapter_terms import Term, chosen
from skyrl_actors.workers.low_rank import joined
from skyrl_actors.workers.network import Network
from skyrl_actors.workers.tensor_files import Shape


class AddedWeights:
    """(alpha / rank) · B A of an adapter, for each tensor of the base's files."""

    def __init__(
        self,
        network: Network,
        lora: LoraSpec,
        adapter: Mapping[str, Tensor],
        stored: Mapping[str, Shape],
    ):
        self._module, self._adapter = network.module, adapter
        self._form = network.stored_form
        self._scale = lora.alpha / lora.rank
        terms = sorted(chosen(network.terms, lora), key=lambda term: term.weight)
        self._terms = {
            weight: tuple(group) for weight, group in groupby(terms, lambda term: term.weight)
        }
        self._weights: dict[str, str] = {}  # of the files -> of the module
        for weight in self._terms:
            shape = self._form.shapes[weight]
            as_computed = stored.get(weight) == shape
            names = [weight] if as_computed else [p.name for p in self._form.parts(weight, shape)]
            self._weights |= dict.fromkeys(names, weight)
        if missing := sorted(self._weights.keys() - stored.keys()):
            raise InvalidRequest(
                f"the adapter cannot be merged: the base model's files have no {missing[0]}"
            )
        self._stored = lru_cache(maxsize=2)(self._in_stored_form)  # gate_up and down

    def of(self, name: str) -> Tensor | None:
        """Return what the adapter adds to this tensor of the files; None: nothing."""
        weight = self._weights.get(name)
        return None if weight is None else self._stored(weight)[name]

    def _in_stored_form(self, weight: str) -> dict[str, Tensor]:
        added = self._added(weight)
        return {weight: added} | dict(self._form.cut(weight, added))

    def _added(self, weight: str) -> Tensor:
        terms, shape = self._terms[weight], self._form.shapes[weight]
        if not terms[0].experts:
            products = [(term.part, self._product(term).t()) for term in terms]
            return joined(products, products[0][1], shape[0]).t()
        transposed = self._module.get_submodule(weight.rpartition(".")[0]).is_transposed
        size = shape[2 if transposed else 1]
        products = [(term.part, self._of_experts(term)) for term in terms]
        merged = joined(products, products[0][1], size).view(terms[0].experts, -1, size)
        return merged if transposed else merged.mT

    def _product(self, term: Term) -> Tensor:
        return self._scale * self._adapter[term.b].double() @ self._adapter[term.a].double()

    def _of_experts(self, term: Term) -> Tensor:
        """Return (B A)ᵀ of all experts, [E · in, out].

        It is float32, because all experts of a layer are held at once.
        """
        a, b = self._adapter[term.a].double(), self._adapter[term.b].double()
        found = [
            (self._scale * b[min(i, len(b) - 1)] @ a[min(i, len(a) - 1)]).t().float()
            for i in range(term.experts)
        ]
        return torch.cat(found)
