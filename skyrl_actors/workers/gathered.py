"""Take part in gathering a model's tensors to the end, also if the rank cannot write them."""

from collections.abc import Iterator

from torch import Tensor

from skyrl_actors.messages.model import CheckpointForm
from skyrl_actors.workers.models import TrainedModel
from skyrl_actors.workers.state import MOMENTS, Kind


class Gathered:
    """The tensors of a checkpoint, which all ranks gather in the same order."""

    def __init__(self, model: TrainedModel, form: CheckpointForm):
        self._state = model.state
        moments = MOMENTS if form == "training" and model.state.num_steps else ()
        self._kinds: list[Kind] = ["weights", *moments]
        self._current: Iterator[tuple[str, Tensor | None]] = iter(())
        self._failed = False

    def of(self, kind: Kind) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the next kind. Only the rank that writes needs them."""
        assert kind == self._kinds.pop(0)
        self._current = self._together(kind)
        for name, tensor in self._current:
            assert tensor is not None
            yield name, tensor

    def finish(self) -> None:
        """Take part in what is left, unless taking part failed."""
        for _ in self._current:
            pass
        while self._kinds and not self._failed:
            for _ in self._together(self._kinds.pop(0)):
                pass

    def _together(self, kind: Kind) -> Iterator[tuple[str, Tensor | None]]:
        tensors = iter(self._state.tensors(kind))
        while True:
            try:
                found = next(tensors, None)
            except Exception:
                self._failed = True
                raise
            if found is None:
                return
            yield found
