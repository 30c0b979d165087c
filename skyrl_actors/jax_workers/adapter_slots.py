"""The adapters of a call of sampling programs, and the slot of each sequence."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
from torch import Tensor

from skyrl_actors.jax_workers.decoder import KINDS
from skyrl_actors.jax_workers.draws import LoadedAdapter
from skyrl_actors.jax_workers.network import JaxNetwork
from skyrl_actors.jax_workers.plans import rank_of
from skyrl_actors.jax_workers.programs import Adapter
from skyrl_actors.jax_workers.weights import Form, kinds_in, outer_in, rank_in
from skyrl_actors.workers.adapter_terms import UNEMBED

NO_VIEWS: Mapping[str, Tensor] = {}


class AdapterForm(NamedTuple):
    """The number of slots and the form of their adapters; none: only the base."""

    slots: int = 0
    form: Form | None = None


class AdapterSlots:
    """The adapters of some sequences in one form, and their scales.

    Sequences without an adapter have a slot of zeros, if others have adapters.
    """

    def __init__(self, network: JaxNetwork, adapters: Collection[LoadedAdapter | None]):
        loaded = list({id(each): each for each in adapters if each}.values())
        has_base = None in adapters
        views = [each.views for each in loaded]
        self._numbers = {id(each): number for number, each in enumerate(loaded)}
        self._base = len(loaded)  # the slot of sequences without an adapter
        self.adapters: tuple[Adapter, ...] = ()
        self.form = AdapterForm()
        self.scale = np.zeros(1, np.float32)
        if not loaded:
            return
        kinds = set[str]().union(*map(kinds_in, views))
        form = Form(
            kinds=tuple(kind for kind in KINDS if kind in kinds),
            head=any(f"{UNEMBED}.lora_A" in view for view in views),
            value=False,
            rank=rank_of(max(map(rank_in, views))),
            outer=max(map(outer_in, views)),
        )
        size = power_of(len(loaded) + has_base)
        self.form = AdapterForm(size, form)
        self.scale = np.zeros(size, np.float32)
        self.scale[: len(loaded)] = [each.scale for each in loaded]
        made = [network.adapter(form, view) for view in views]
        empty = [network.adapter(form, NO_VIEWS)] * (size - len(loaded))
        self.adapters = (*made, *empty)

    def number(self, adapter: LoadedAdapter | None) -> int:
        if not self.adapters:
            return 0
        return self._numbers[id(adapter)] if adapter else self._base


def power_of(least: int, base: int = 2, start: int = 1) -> int:
    """Return the first of start, start · base, start · base², … that is at least so large."""
    while start < least:
        start *= base
    return start
