"""Keep pending gradients in other memory than their weights.

torch requires a parameter and its `.grad` on the same device. So gradients are detached before they
leave, and attached again when they are on the device of their parameters.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from skyrl_actors.transport.device_memory import placed


class PendingGradients:
    """The gradients of these parameters, in this attribute of each."""

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
        """Return the gradients on their current devices."""
        attached = (getattr(parameter, self._attribute, None) for parameter in self._parameters)
        return [
            *self._detached.values(),
            *(gradient for gradient in attached if gradient is not None),
        ]
