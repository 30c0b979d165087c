"""Count what each answered request used, for quotas and for the usage of keys."""

from collections.abc import Callable, Mapping

from skyrl_actors.controller.administration import Administration
from skyrl_actors.controller.free_space import FreeSpace
from skyrl_actors.controller.operations import Op, Outcome
from skyrl_actors.controller.quotas import Reserved
from skyrl_actors.controller.verbs import verb_of
from skyrl_actors.messages.paths import owner_of
from skyrl_actors.messages.requests import Request, Sample, Unload
from skyrl_actors.messages.results import CANCELLED_KIND, Failure
from skyrl_actors.messages.usage import HOUR_S, Usage


class Metering:
    """Admits requests by the quotas of their keys. `base_model`: the default one."""

    def __init__(self, admin: Administration, space: FreeSpace, wall: Callable[[], float]):
        self._admin = admin
        self._space = space
        self.base_model = ""
        self._wall = wall

    def check_accepts(self, owner: str) -> None:
        """Raise CapacityError or Unavailable if nothing new of this owner is accepted."""
        self._admin.mode.check_accepts()
        self._space.check(owner)

    def admit_session(self, owner: str) -> None:
        """Count a new session for the rates. Raise CapacityError or Unavailable."""
        self.check_accepts(owner)
        self._admin.quotas.count(owner)

    def admit(self, op: Op, request: Request, num_open: int) -> None:
        """Count a request. Raise CapacityError, QuotaUsed or Unavailable if it is not accepted now.

        What only frees a model is always accepted.
        """
        if not isinstance(request, Unload):
            owner, tokens = owner_of(op.request_id), verb_of(request).input_tokens(request)
            self.check_accepts(owner)
            is_sample = isinstance(request, Sample)
            reserved = Reserved(samples=op.cost[1]) if is_sample else Reserved(training=tokens)
            self._admin.quotas.admit(owner, tokens, num_open, reserved)
            op.reserved = reserved

    def withdraw(self, op: Op, request: Request) -> None:
        """Give back what `admit` counted, because the request was not accepted after all."""
        if not isinstance(request, Unload):
            owner = owner_of(op.request_id)
            self._admin.quotas.release(owner, op.reserved)
            self._admin.quotas.withdraw(owner, verb_of(request).input_tokens(request))

    def answered(self, op: Op, outcome: Outcome, usage: Usage) -> None:
        """Count the usage of an answer that is in the journal."""
        if isinstance(outcome.result, Failure):
            self._admin.recent.note_failure(op, outcome.result)
        self._admin.quotas.release(owner_of(op.request_id), op.reserved)
        self._admin.quotas.answered(usage)

    def used(self, op: Op, outcome: Outcome) -> Usage:
        """Return what a request used that is being answered.

        A failed one has used no tokens, except a sample that was cancelled after it began, or of
        which its client has read something: its prompt, and what was read.
        """
        result, request = outcome.result, op.request
        is_failed = isinstance(result, Failure)
        counted: Mapping[str, int] = {}
        if request is not None and not is_failed:
            counted = verb_of(request).usage(request, result)
        elif (
            isinstance(request, Sample)
            and op.begun is not None
            and (op.streamed or (isinstance(result, Failure) and result.kind == CANCELLED_KIND))
        ):
            counted = {"prompt_tokens": len(request.prompt), "sampled_tokens": op.streamed}
        now = int(self._wall())
        return Usage(
            hour=now - now % HOUR_S,
            owner=owner_of(op.request_id) or owner_of(op.session_id or ""),
            session_id=op.session_id or "",
            base_model=op.base_model or self.base_model,
            requests=1,
            failed=int(is_failed),
            **counted,
        )
