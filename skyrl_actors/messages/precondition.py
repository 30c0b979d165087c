"""The operation that a rank is about to apply, and the state that it requires (frozen)."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class OpPrecondition:
    """Operation `number`, which must be applied to the state that operation `after` left.

    `number` None: the operation leaves the state as it is. `after` None: the operation replaces any
    state. Ranks refuse an operation on another state. So a bookkeeping bug triggers recovery
    instead of wrong results. `request_id` is for traces and logs only.
    """

    number: int | None
    after: int | None = None
    request_id: str = field(default="", compare=False)
