"""What a rank needs so that each operation is applied once, whatever dies around it (pure: no Ray, no torch).

It keeps the epoch of its controller, and for every model the last operation that was applied with its result. An
operation that is asked for again gets that result; one that broke off leaves the model torn, and a torn model answers
nothing until it is made anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_actors.messages.errors import InternalError, SkyrlActorsError, StateLost, UserError
from skyrl_actors.messages.turn import Turn
from skyrl_actors.workers.interface import TORN, PartCall, Refused

MAKE_ANEW = ("create_model", "restore_state")
FORWARD_BACKWARD = "forward_backward"
CLEAN_FAILURES = ("optim_step",)  # a refusal that leaves the same state on every rank: gradients dropped


@dataclass(frozen=True, slots=True)
class Applied:
    number: int
    method: str  # an operation may have two parts: a model that is made and then filled
    result: Any
    error: SkyrlActorsError | None = None


class ExactlyOnce:
    """Around a worker whose verbs it calls by name."""

    def __init__(self, worker: Any):
        self.worker = worker
        self.epoch = 0
        self._applied: dict[str, Applied] = {}
        self._held: set[str] = set()  # torn models too: they take memory until they are deleted

    def adopt(self, epoch: int) -> dict[str, int]:
        """From now on only this epoch's calls are served. Returns the last operation applied to each model, TORN for torn ones."""
        self.fence(epoch)
        self.epoch = epoch
        whole = {model_id: applied.number for model_id, applied in self._applied.items()}
        return {**dict.fromkeys(sorted(self._held), TORN), **whole}

    def fence(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise InternalError(f"epoch {epoch} is over: a newer controller ({self.epoch}) has taken this part")

    def delete(self, epoch: int, model_id: str) -> None:
        self.fence(epoch)
        self._applied.pop(model_id, None)
        self.worker.delete_model(model_id)
        self._held.discard(model_id)

    def apply(self, epoch: int, model_id: str, turn: Turn, method: str, *args: Any) -> Any:
        """A verb of a model."""
        self.fence(epoch)
        known = self._applied.get(model_id)
        if turn.number is None:
            self._check_state(model_id, turn)
            return getattr(self.worker, method)(*args)
        if known is not None and (known.number, known.method) == (turn.number, method) and method != "restore_state":
            if known.error is not None:
                raise known.error
            return known.result
        if method not in MAKE_ANEW:
            self._check_state(model_id, turn)
        return self._apply(model_id, turn.number, method, args)

    def forward_backward(self, epoch: int, turns: Sequence[Turn], calls: Sequence[PartCall], forward_only: bool) -> list[Any]:
        """Parts of several models at once, each by its own turn: for each its result, or the error that it alone has."""
        self.fence(epoch)
        outcomes: list[Any] = [None] * len(calls)
        todo: list[int] = []
        for i, (turn, call) in enumerate(zip(turns, calls, strict=True)):
            known = self._applied.get(call.model_id)
            if known is not None and turn.number is not None and (known.number, known.method) == (turn.number, FORWARD_BACKWARD):
                outcomes[i] = known.result
                continue
            try:
                self._check_state(call.model_id, turn)
                todo.append(i)
            except StateLost as error:
                outcomes[i] = error
        before = {i: self._whole(calls[i].model_id) for i in todo}
        for i in todo:
            if turns[i].number is not None:
                self._applied.pop(calls[i].model_id)  # torn, until it is done
        results = self.worker.forward_backward(tuple(calls[i] for i in todo), forward_only) if todo else []
        for i, result in zip(todo, results, strict=True):
            model_id, number = calls[i].model_id, turns[i].number
            outcomes[i] = result.error if isinstance(result, Refused) else result
            if number is not None:
                if not isinstance(result, Refused):
                    self._applied[model_id] = Applied(number, FORWARD_BACKWARD, result)
                elif result.clean:
                    self._applied[model_id] = before[i]
        return outcomes

    def _apply(self, model_id: str, number: int, method: str, args: tuple[Any, ...]) -> Any:
        self._applied.pop(model_id, None)  # torn, until it is done
        self._held.add(model_id)
        try:
            result = getattr(self.worker, method)(*args)
        except UserError as error:
            if method in CLEAN_FAILURES:
                self._applied[model_id] = Applied(number, method, None, error)
            raise
        self._applied[model_id] = Applied(number, method, result)
        return result

    def _check_state(self, model_id: str, turn: Turn) -> None:
        at = self._whole(model_id).number
        if at != turn.after:
            raise StateLost(f"{model_id} is behind operation {at}, not {turn.after} as operation {turn.number} wants it")

    def _whole(self, model_id: str) -> Applied:
        known = self._applied.get(model_id)
        if known is None:
            raise StateLost(f"this rank does not hold a whole {model_id}")
        return known
