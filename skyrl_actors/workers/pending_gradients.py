"""Gradients that wait for their step in other memory than the weights they belong to.

A parameter takes no `.grad` on another device than its own. So gradients are detached before they leave, and attached again
when they are where their parameters are.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from skyrl_actors.device_memory import placed


class PendingGradients:
    """Of these parameters, in this attribute of each."""

    def __init__(self, parameters: Iterable[nn.Parameter], attribute: str = "grad"):
        self._parameters = list(parameters)
        self._attribute = attribute
        self._detached: dict[int, Tensor] = {}  # by index of the parameter

    def move(self, device: torch.device) -> None:
        for index, parameter in enumerate(self._parameters):
            held = self._detached.pop(index, None)
            if held is None:
                held = getattr(parameter, self._attribute, None)
            if held is None:
                continue
            setattr(parameter, self._attribute, None)
            moved = placed(held, device)
            if moved.device == parameter.device:
                setattr(parameter, self._attribute, moved)
            else:
                self._detached[index] = moved

    def drop(self) -> None:
        self._detached.clear()

    def tensors(self) -> list[Tensor]:
        """Wherever they are."""
        attached = (getattr(parameter, self._attribute, None) for parameter in self._parameters)
        return [*self._detached.values(), *(gradient for gradient in attached if gradient is not None)]
