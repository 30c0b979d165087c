"""One datum of a batch, as sent."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.messages.images import Picture

TARGETS = "target_tokens"
WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Example:
    """One datum: tokens [T] int32 and arrays by name, all [T] or all [T, K]."""

    tokens: NDArray[np.int32]
    fields: dict[str, NDArray[np.generic]]
    pictures: tuple[Picture, ...] = ()  # in the order of their places
