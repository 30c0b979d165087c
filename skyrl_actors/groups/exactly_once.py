"""Apply each operation of a rank exactly once, despite retries and restarts (no Ray, no torch).

A rank keeps the epoch of its controller. For each model, it keeps the last applied operation and
its result. A repeated operation gets that result. An operation that fails midway leaves the model
torn. A torn model rejects all calls until it is rebuilt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_actors.messages.errors import InternalError, SkyrlActorsError, StateLost, UserError
from skyrl_actors.messages.precondition import OpPrecondition
from skyrl_actors.workers.interface import TORN, PartCall, Refused, RowOutput

REBUILDS = ("create_model", "restore_state")
FORWARD_BACKWARD = "forward_backward"
# Their refusals leave the same state on every rank: the gradients are dropped.
CLEAN_FAILURES = ("optim_step",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """The last operation that was applied to a model."""

    number: int
    # One operation can have two parts: create a model, then fill it.
    method: str
    result: Any
    error: SkyrlActorsError | None = None


class ExactlyOnce:
    """Wrap a worker, and call its methods by name."""

    def __init__(self, worker: Any):
        self.worker = worker
        self.epoch = 0
        self._applied: dict[str, Applied] = {}
        # Torn models are included: they occupy memory until they are deleted.
        self._held: set[str] = set()

    def adopt(self, epoch: int) -> dict[str, int]:
        """Accept calls of this epoch only, and return the last operation applied to each model.

        The value is TORN for torn models.
        """
        self.fence(epoch)
        self.epoch = epoch
        whole = {model_id: applied.number for model_id, applied in self._applied.items()}
        return {**dict.fromkeys(sorted(self._held), TORN), **whole}

    def fence(self, epoch: int) -> None:
        """Raise InternalError for a call of an earlier epoch."""
        if epoch < self.epoch:
            raise InternalError(
                f"epoch {epoch} is over: a newer controller ({self.epoch}) controls this rank"
            )

    def delete(self, epoch: int, model_id: str) -> None:
        """Delete a model, also a torn one."""
        self.fence(epoch)
        self._applied.pop(model_id, None)
        self.worker.delete_model(model_id)
        self._held.discard(model_id)

    def apply(
        self, epoch: int, model_id: str, precondition: OpPrecondition, method: str, *args: Any
    ) -> Any:
        """Run a verb of a model. Raises StateLost when the state is not the expected one."""
        self.fence(epoch)
        known = self._applied.get(model_id)
        if precondition.number is None:
            self._check_state(model_id, precondition)
            return getattr(self.worker, method)(*args)
        if (
            known is not None
            and (known.number, known.method) == (precondition.number, method)
            and method != "restore_state"
        ):
            if known.error is not None:
                raise known.error
            return known.result
        if method not in REBUILDS:
            self._check_state(model_id, precondition)
        return self._apply(model_id, precondition.number, method, args)

    def forward_backward(
        self,
        epoch: int,
        preconditions: Sequence[OpPrecondition],
        calls: Sequence[PartCall],
        forward_only: bool,
    ) -> list[Any]:
        """Run parts of several models in one call, each with its own precondition.

        Returns for each part its result, or the error of that part.
        """
        self.fence(epoch)
        outcomes: list[Any] = [None] * len(calls)
        todo: list[int] = []
        for i, (precondition, call) in enumerate(zip(preconditions, calls, strict=True)):
            known = self._applied.get(call.model_id)
            if (
                known is not None
                and precondition.number is not None
                and (known.number, known.method) == (precondition.number, FORWARD_BACKWARD)
            ):
                outcomes[i] = known.result
                continue
            try:
                self._check_state(call.model_id, precondition)
                todo.append(i)
            except StateLost as error:
                outcomes[i] = error
        before = {i: self._whole(calls[i].model_id) for i in todo}
        for i in todo:
            if preconditions[i].number is not None:
                self._applied.pop(calls[i].model_id)  # torn until it succeeds
        results: Sequence[RowOutput | Refused] = (
            self.worker.forward_backward(tuple(calls[i] for i in todo), forward_only)
            if todo
            else list[RowOutput | Refused]()
        )
        for i, result in zip(todo, results, strict=True):
            model_id, number = calls[i].model_id, preconditions[i].number
            outcomes[i] = result.error if isinstance(result, Refused) else result
            if number is not None:
                if not isinstance(result, Refused):
                    self._applied[model_id] = Applied(
                        number=number, method=FORWARD_BACKWARD, result=result
                    )
                elif result.clean:
                    self._applied[model_id] = before[i]
        return outcomes

    def _apply(self, model_id: str, number: int, method: str, args: tuple[Any, ...]) -> Any:
        self._applied.pop(model_id, None)  # torn until it succeeds
        self._held.add(model_id)
        try:
            result = getattr(self.worker, method)(*args)
        except UserError as error:
            if method in CLEAN_FAILURES:
                self._applied[model_id] = Applied(
                    number=number, method=method, result=None, error=error
                )
            raise
        self._applied[model_id] = Applied(number=number, method=method, result=result)
        return result

    def _check_state(self, model_id: str, precondition: OpPrecondition) -> None:
        at = self._whole(model_id).number
        if at != precondition.after:
            raise StateLost(
                f"{model_id} is at operation {at}, but the call requires operation "
                f"{precondition.after} (number of the call: {precondition.number})"
            )

    def _whole(self, model_id: str) -> Applied:
        known = self._applied.get(model_id)
        if known is None:
            raise StateLost(f"this rank holds no complete state of {model_id}")
        return known
